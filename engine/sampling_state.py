"""Sampling parameters of every row, and the choice of one step's tokens.

Parameters live in a host mirror and in one device table, uploaded when rows start. What a set of rows needs (penalties,
bias, filters, log-probabilities) is worked out once per distinct set and kept until rows change, so a steady batch
spends no host time on it. Token counts for penalties exist only once some row asks for them; they are kept on the
device and include a token as soon as it is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling import NEG_INF, apply_filters, apply_penalties, draw, top_logprobs
from segue.sampling_params import SamplingParams

_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = range(6)
_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's choice, on the device; index i belongs to the i-th row that was sampled."""

    tokens: torch.Tensor
    """int64 [rows]"""
    failed: torch.Tensor
    """bool [rows]: logits were NaN or infinite; the token means nothing."""
    logprob_rows: tuple[int, ...] = ()
    """Indices i that wanted log-probabilities; the next three tensors are in this order."""
    logprob_counts: tuple[int, ...] = ()
    """How many alternatives each of them asked for; the tensors hold the largest."""
    logprobs: torch.Tensor | None = None
    top_values: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _RowSet:
    """What one set of rows needs; index tensors are on the device and index into the set."""

    rows: torch.Tensor
    greedy: torch.Tensor | None
    """bool [rows]; None: no row is greedy."""
    all_greedy: bool
    temperature: torch.Tensor
    seeds: torch.Tensor
    filtered: torch.Tensor | None
    penalised: torch.Tensor | None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    min_tokens: tuple[int, ...]
    logprob_rows: tuple[int, ...]
    logprob_counts: tuple[int, ...]
    logprob_index: torch.Tensor | None
    alternatives: int


class SamplingState:
    """`rows_max` rows over a vocabulary of `vocab_size` real tokens (`vocab_rows` with padding)."""

    def __init__(
        self, rows_max: int, vocab_size: int, vocab_rows: int, eos_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.vocab_size, self.vocab_rows = vocab_size, vocab_rows
        self.eos_ids = eos_ids
        self.device = device
        self._params: list[SamplingParams] = [SamplingParams()] * rows_max
        self._tokens_prompt = [0] * rows_max
        self._values = np.zeros((rows_max, _COLUMNS), dtype=np.float32)
        self._top_k = np.zeros(rows_max, dtype=np.int64)
        self._seeds = np.zeros(rows_max, dtype=np.int64)
        self._generated: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        self._sets: dict[tuple[int, ...], _RowSet] = {}

    def start(self, row: int, params: SamplingParams, tokens: list[int], tokens_prompt: int) -> None:
        """Bind `row` to a sequence of `tokens` known tokens, the first `tokens_prompt` of which are the prompt."""
        self._params[row], self._tokens_prompt[row] = params, tokens_prompt
        self._values[row] = (
            params.temperature or 1.0,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self._top_k[row] = params.top_k
        self._seeds[row] = np.array(params.seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64).view(np.int64)
        self._sets.clear()
        if has_penalty(params):
            self._count(row, tokens, tokens_prompt)

    def count_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """How often each row generated each token, int32, and what its prompt holds, bool: both [rows, vocab_rows].
        Made when first asked for; from then on they keep their place in memory."""
        if self._generated is None or self._in_prompt is None:
            shape = (len(self._params), self.vocab_rows)
            self._generated = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self._generated, self._in_prompt

    def _count(self, row: int, tokens: list[int], tokens_prompt: int) -> None:
        generated, in_prompt = (table[row].zero_() for table in self.count_tables())
        known = self._on_device(torch.tensor(tokens, dtype=torch.int64))
        in_prompt.index_fill_(0, known[:tokens_prompt], True)
        later = known[tokens_prompt:]
        generated.index_put_((later,), torch.ones_like(later, dtype=torch.int32), accumulate=True)

    def prompt_scoring(self, row: int) -> tuple[int | None, int]:
        """(alternatives to score its prompt tokens with, None: not at all; how many tokens that prompt has)"""
        return self._params[row].prompt_logprobs, self._tokens_prompt[row]

    def choose(
        self, logits: torch.Tensor, rows: tuple[int, ...], positions: torch.Tensor, positions_host: tuple[int, ...]
    ) -> SampledTokens:
        """Sample one token for each of `rows`. logits float32 [rows, vocab_rows], overwritten; `positions` int64 [rows]
        are the positions the tokens will stand at."""
        chosen = self._sets.get(rows)
        if chosen is None:
            chosen = self._sets[rows] = self._row_set(rows)
        if self.vocab_rows > self.vocab_size:
            logits[:, self.vocab_size :] = NEG_INF
        best, greedy_tokens = logits.max(dim=-1)
        failed = ~torch.isfinite(best)
        raw = None if chosen.logprob_index is None else logits[chosen.logprob_index]
        if self._is_plain_greedy(chosen):
            tokens = greedy_tokens
        else:
            tokens = self._processed(logits, chosen, rows, positions, positions_host)
        if chosen.penalised is not None and self._generated is not None:
            counted = chosen.rows[chosen.penalised], tokens[chosen.penalised]
            self._generated.index_put_(counted, torch.ones_like(counted[1], dtype=torch.int32), accumulate=True)
        if raw is None or chosen.logprob_index is None:
            return SampledTokens(tokens, failed)
        reported = top_logprobs(raw, tokens[chosen.logprob_index], chosen.alternatives)
        return SampledTokens(tokens, failed, chosen.logprob_rows, chosen.logprob_counts, *reported)

    def _is_plain_greedy(self, chosen: _RowSet) -> bool:
        return chosen.all_greedy and chosen.penalised is None and chosen.bias is None and not chosen.min_tokens

    def _processed(
        self,
        logits: torch.Tensor,
        chosen: _RowSet,
        rows: tuple[int, ...],
        positions: torch.Tensor,
        positions_host: tuple[int, ...],
    ) -> torch.Tensor:
        if chosen.bias is not None:
            row_index, ids, values = chosen.bias
            logits.index_put_((row_index, ids), values, accumulate=True)
        self._mask_early_stops(logits, chosen, rows, positions_host)
        if chosen.penalised is not None and self._generated is not None and self._in_prompt is not None:
            at, table_rows = chosen.penalised, chosen.rows[chosen.penalised]
            values = self._device_values(rows)[at]
            logits[at] = apply_penalties(
                logits[at],
                self._generated[table_rows],
                self._in_prompt[table_rows],
                values[:, _PRESENCE],
                values[:, _FREQUENCY],
                values[:, _REPETITION],
            )
        if chosen.all_greedy:
            return logits.argmax(dim=-1)
        scaled = logits / chosen.temperature[:, None]
        if chosen.filtered is not None:
            at = chosen.filtered
            values = self._device_values(rows)[at]
            top_k = self._on_device(torch.from_numpy(self._top_k[list(rows)]))[at]
            scaled[at] = apply_filters(scaled[at], top_k, values[:, _TOP_P], values[:, _MIN_P])
        tokens = draw(scaled, chosen.seeds, positions)
        return tokens if chosen.greedy is None else torch.where(chosen.greedy, logits.argmax(dim=-1), tokens)

    def _mask_early_stops(
        self, logits: torch.Tensor, chosen: _RowSet, rows: tuple[int, ...], positions_host: tuple[int, ...]
    ) -> None:
        """Below min_tokens, neither EOS nor stop ids may be chosen."""
        for index in chosen.min_tokens:
            row = rows[index]
            params = self._params[row]
            if positions_host[index] - self._tokens_prompt[row] < params.min_tokens:
                banned = list(params.stop_token_ids) + ([] if params.ignore_eos else list(self.eos_ids))
                logits[index, [token for token in banned if token < self.vocab_size]] = NEG_INF

    def _device_values(self, rows: tuple[int, ...]) -> torch.Tensor:
        return self._on_device(torch.from_numpy(self._values[list(rows)]))

    def _row_set(self, rows: tuple[int, ...]) -> _RowSet:
        params = [self._params[row] for row in rows]
        greedy = [p.is_greedy for p in params]
        reported = tuple(i for i, p in enumerate(params) if p.logprobs is not None)
        return _RowSet(
            rows=self._index(rows),
            greedy=self._on_device(torch.tensor(greedy)) if any(greedy) else None,
            all_greedy=all(greedy),
            temperature=self._device_values(rows)[:, _TEMPERATURE],
            seeds=self._on_device(torch.from_numpy(self._seeds[list(rows)])),
            filtered=self._index_where([has_filter(p) and not p.is_greedy for p in params]),
            penalised=self._index_where([has_penalty(p) for p in params]),
            bias=self._bias(params),
            min_tokens=tuple(i for i, p in enumerate(params) if p.min_tokens > 0),
            logprob_rows=reported,
            logprob_counts=tuple(params[i].logprobs or 0 for i in reported),
            logprob_index=self._index(reported) if reported else None,
            alternatives=max((params[i].logprobs or 0 for i in reported), default=0),
        )

    def _index(self, values: tuple[int, ...] | list[int]) -> torch.Tensor:
        return self._on_device(torch.tensor(values, dtype=torch.int64))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device, which has a forward to run before it needs this."""
        return tensor.to(self.device, non_blocking=True)

    def _index_where(self, flags: list[bool]) -> torch.Tensor | None:
        return self._index([i for i, flag in enumerate(flags) if flag]) if any(flags) else None

    def _bias(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        entries = [(i, token, value) for i, p in enumerate(params) for token, value in sorted(p.logit_bias.items())]
        if not entries:
            return None
        index, ids, values = zip(*entries, strict=True)
        return self._index(index), self._index(ids), self._on_device(torch.tensor(values, dtype=torch.float32))


def has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def has_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
