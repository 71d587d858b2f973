"""An engine without tensors, whose tokens are right only if every page held the right K/V.

The "K/V" of a position is the hash of all tokens up to it, and it is computed from the K/V of the position before as it
stands in the block table. So a page that was lost, mixed up, overwritten or read too early changes every later token,
and a test needs only to compare tokens with `toy_tokens`. Pages lie in a byte buffer that a mover can copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence

from segue.block_hash import chain_root
from segue.errors import InternalError
from segue.kv_layout import KvLayout
from segue.model_card import ModelCard
from segue.plan import BatchPlan, Chunk, PlanResult, PromptScores, RowScores, RowStart, RowTokens, TokenLogprobs

SLOT_BYTES = 8
VOCAB_SIZE = 1000
ROOT_SLOT = b"\1" * SLOT_BYTES


def _slot(previous: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous + struct.pack("<I", token), digest_size=SLOT_BYTES).digest()


def _sampled(slot: bytes, seed: int) -> int:
    digest = hashlib.blake2b(slot + struct.pack("<Q", seed), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def toy_tokens(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    slot, tokens = ROOT_SLOT, []
    for token in prompt:
        slot = _slot(slot, token)
    for _ in range(count):
        tokens.append(_sampled(slot, seed))
        slot = _slot(slot, tokens[-1])
    return tokens


def _score(slot: bytes, token: int) -> float:
    """A log-probability of `token` that is right only if the K/V before it is."""
    return -int.from_bytes(_slot(slot, token)[:2], "little") / 4096


def toy_scores(prompt: Sequence[int], alternatives: int) -> PromptScores:
    """What the engine says of all prompt tokens but the first."""
    slots = [ROOT_SLOT]
    for token in prompt[:-1]:
        slots.append(_slot(slots[-1], token))
    return _scores(1, slots[1:], prompt[1:], alternatives)


def _scores(position: int, slots: Sequence[bytes], tokens: Sequence[int], alternatives: int) -> PromptScores:
    """`slots` before each of `tokens`. The alternatives are the first tokens of the vocabulary."""
    return PromptScores(
        position=position,
        alternatives=alternatives,
        logprobs=[_score(slot, token) for slot, token in zip(slots, tokens, strict=True)],
        ranks=[1 + token for token in tokens],
        top_ids=list(range(alternatives)) * len(tokens),
        top_logprobs=[_score(slot, other) for slot in slots for other in range(alternatives)],
    )


def toy_layout(block_size: int) -> KvLayout:
    """One layer, one head, one float32 each for K and V: `SLOT_BYTES` a token."""
    return KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")


def toy_card(max_model_len: int) -> ModelCard:
    return ModelCard(
        name="toy",
        architecture="toy",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        tokenizer_json="{}",
        chat_template=None,
        digest="toy",
    )


class _Row:
    def __init__(self, start: RowStart) -> None:
        self.seq = start.seq
        self.tokens = list(start.tokens)
        self.tokens_prompt = start.tokens_prompt
        self.pages = list(start.pages)
        self.sampling = start.sampling


class ToyEngine:
    """`buffer` holds at least `pages_total` pages; without one the engine makes its own."""

    def __init__(
        self, pages_total: int, block_size: int, *, max_model_len: int = 4096, buffer: memoryview | None = None
    ) -> None:
        self.card = toy_card(max_model_len)
        self.layout = toy_layout(block_size)
        self.kv_root = chain_root({"toy": 1, "block_size": block_size})
        self.numerics = ""
        self.pages_total = pages_total
        self.buffer = memoryview(bytearray(pages_total * self.layout.page_bytes)) if buffer is None else buffer
        self._rows: dict[int, _Row] = {}
        self._launched: deque[BatchPlan] = deque()

    def launch(self, plan: BatchPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> PlanResult:
        """Execute the oldest launched plan."""
        plan = self._launched.popleft()
        for row in plan.ends:
            del self._rows[row]
        for source, target in plan.copies:
            self._copy_page(source, target)
        for start in plan.starts:
            if start.row in self._rows:
                raise InternalError(f"row {start.row} started twice")
            self._rows[start.row] = _Row(start)
        for row, pages in plan.grows:
            self._rows[row].pages.extend(pages)
        rows = self._compute(plan)
        scores = [found for chunk in plan.chunks if (found := self._chunk_scores(chunk)) is not None]
        return PlanResult(op=plan.op, steps=plan.steps_max, rows=rows, elapsed_us=1, scores=scores)

    def close(self) -> None:
        self._rows.clear()
        self._launched.clear()

    def _compute(self, plan: BatchPlan) -> list[RowTokens]:
        sampled: dict[int, list[int]] = {}
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            for position in range(chunk.start, chunk.start + chunk.length):
                self._write(row, position)
            if chunk.sample:
                sampled[chunk.row] = [self._sample(row)]
        for _ in range(plan.steps_max):
            for number in plan.decodes:
                row = self._rows[number]
                self._write(row, len(row.tokens) - 1)
                sampled.setdefault(number, []).append(self._sample(row))
        return [self._row_tokens(number, tokens) for number, tokens in sampled.items()]

    def _row_tokens(self, number: int, tokens: list[int]) -> RowTokens:
        row = self._rows[number]
        wanted = row.sampling.logprobs is not None
        return RowTokens(number, row.seq, tokens, [TokenLogprobs(-1.0) for _ in tokens] if wanted else None)

    def _chunk_scores(self, chunk: Chunk) -> RowScores | None:
        row = self._rows[chunk.row]
        end = min(chunk.start + chunk.length, row.tokens_prompt - 1)
        if row.sampling.prompt_logprobs is None or end <= chunk.start:
            return None
        slots = [self._read(row, position) for position in range(chunk.start, end)]
        tokens = row.tokens[chunk.start + 1 : end + 1]
        return RowScores(chunk.row, row.seq, _scores(chunk.start + 1, slots, tokens, row.sampling.prompt_logprobs))

    def _sample(self, row: _Row) -> int:
        token = _sampled(self._read(row, len(row.tokens) - 1), row.sampling.seed)
        row.tokens.append(token)
        return token

    def _offset(self, row: _Row, position: int) -> int:
        block, inside = divmod(position, self.layout.block_size)
        return row.pages[block] * self.layout.page_bytes + inside * SLOT_BYTES

    def _read(self, row: _Row, position: int) -> bytes:
        offset = self._offset(row, position)
        return bytes(self.buffer[offset : offset + SLOT_BYTES])

    def _write(self, row: _Row, position: int) -> None:
        previous = self._read(row, position - 1) if position else ROOT_SLOT
        offset = self._offset(row, position)
        self.buffer[offset : offset + SLOT_BYTES] = _slot(previous, row.tokens[position])

    def _copy_page(self, source: int, target: int) -> None:
        size = self.layout.page_bytes
        self.buffer[target * size : (target + 1) * size] = self.buffer[source * size : (source + 1) * size]
