"""From sampling parameters to what the graphs' kernels read: a row's words in the place block, and its line in the
table of wishes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from segue_kernels.general_sampling import GeneralSampling
from segue_kernels.row_sampling import ALTERNATIVES_MAX, RowTable, RowWish

from engine.sampling_state import SamplingState, has_filter, has_penalty
from segue.plan import TokenLogprobs
from segue.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PlaceWords:
    """What every sampled row has: its words in the place block."""

    temperature_bits: int
    seed_low: int
    seed_high: int


GREEDY = PlaceWords(0, 0, 0)


def place_words(params: SamplingParams) -> PlaceWords:
    seed = np.array([params.seed & 0xFFFFFFFFFFFFFFFF], dtype="<u8").view("<i4")
    bits = np.array([params.temperature], dtype=np.float32).view(np.int32)
    return PlaceWords(int(bits[0]), int(seed[0]), int(seed[1]))


def row_wish(params: SamplingParams, tokens_prompt: int, eos_ids: tuple[int, ...], vocab_size: int) -> RowWish | None:
    """None when temperature and seed say it all."""
    filtered = has_filter(params) and not params.is_greedy
    if not (
        filtered or has_penalty(params) or params.logit_bias or params.min_tokens > 0 or params.logprobs is not None
    ):
        return None
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens > 0 else set()
    return RowWish(
        top_k=params.top_k if filtered else 0,
        top_p=params.top_p if filtered else 1.0,
        log_min_p=float(torch.log(torch.tensor(params.min_p))) if filtered else float("-inf"),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        stops_until=tokens_prompt + params.min_tokens,
        stops=[token for token in stops if token < vocab_size],
        biases=list(params.logit_bias.items()),
        logprobs=params.logprobs,
    )


class RowWishes:
    """The table of wishes of one engine's rows, kept on the device as rows start."""

    def __init__(self, sampling: SamplingState, places_max: int) -> None:
        self._sampling = sampling
        self.general = GeneralSampling.allocate(
            RowTable.allocate(*sampling.count_tables()), places_max, sampling.vocab_size
        )
        self._general_rows: set[int] = set()
        """Rows whose line on the device is not that of a plain row."""

    def start(self, row: int, params: SamplingParams, tokens_prompt: int) -> None:
        """Without waiting for the device: steps in flight read the line before it changes."""
        wish = row_wish(params, tokens_prompt, self._sampling.eos_ids, self._sampling.vocab_size)
        words = self.general.table.words
        if wish is not None:
            line = torch.from_numpy(wish.words())
            words[row, : len(line)].copy_(line, non_blocking=True)
            self._general_rows.add(row)
        elif row in self._general_rows:
            words[row, 0].zero_()
            self._general_rows.remove(row)


def token_logprobs(report: torch.Tensor, alternatives: int) -> TokenLogprobs:
    """A place's report on the host, float32 [REPORT_WORDS], as the engine reports it."""
    values = report[1 : 1 + alternatives].tolist()
    ids = report[1 + ALTERNATIVES_MAX :].view(torch.int32)[:alternatives].tolist()
    return TokenLogprobs(float(report[0]), list(zip(ids, values, strict=True)))
