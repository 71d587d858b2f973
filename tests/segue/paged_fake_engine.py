"""A fake engine that knows what every K/V slot holds, so that a wrong block table is noticed where it is read.

Each slot (page, offset) remembers the digest of the whole token prefix whose K/V was written there. Computing a
position reads all earlier ones through the block table and fails if any holds something else: wrong sharing, reuse of a
page too early, a missing copy-on-write, an unwritten slot. The token sampled at position n depends on what was read at
n - 1, so that `reference_tokens`, which knows no pages at all, is an oracle for whole outputs.

Plans run when their result is collected, as late as the contract allows: whatever happens to their pages in between
shows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from segue.block_pool import BlockPool
from segue.plan import BatchPlan, PlanResult, RowStart, RowTokens

VOCAB = 50
EMPTY = b""


def extend_digest(digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=12).digest()


def prefix_digests(tokens: list[int]) -> list[bytes]:
    digests, digest = [], EMPTY
    for token in tokens:
        digest = extend_digest(digest, token)
        digests.append(digest)
    return digests


def next_token(digest: bytes) -> int:
    return int.from_bytes(digest[:4], "little") % VOCAB


def reference_tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake model generates after `prompt`."""
    digest, tokens = prefix_digests(prompt)[-1], []
    for _ in range(count):
        tokens.append(next_token(digest))
        digest = extend_digest(digest, tokens[-1])
    return tokens


@dataclass
class Row:
    seq: int
    tokens: list[int]
    pages: list[int]


class PagedFakeEngine:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.slots: dict[tuple[int, int], bytes] = {}
        self.rows: dict[int, Row] = {}
        self.queue: deque[BatchPlan] = deque()
        self.errors: dict[int, str] = {}
        """Sequences whose next sampled row fails."""
        self.positions_computed = 0

    def launch(self, plan: BatchPlan) -> None:
        self.queue.append(plan)

    def collect(self, steps: int | None = None) -> PlanResult:
        """Run the oldest plan; `steps` of its decode steps, all by default."""
        plan = self.queue.popleft()
        for row in plan.ends:
            del self.rows[row]
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.slots[target, offset] = self.slots.get((source, offset), EMPTY)
        for start in plan.starts:
            self._start(start)
        for row, pages in plan.grows:
            self.rows[row].pages.extend(pages)
        assert plan.chunks or plan.decodes, "a plan without work"
        return self._compute(plan, min(steps or plan.steps_max, plan.steps_max))

    def _start(self, start: RowStart) -> None:
        assert start.row not in self.rows, f"row {start.row} is taken"
        self.rows[start.row] = Row(start.seq, list(start.tokens), list(start.pages))
        self._read(self.rows[start.row], start.tokens_ready)

    def _compute(self, plan: BatchPlan, steps: int) -> PlanResult:
        assert plan.steps_max == 1 or not plan.chunks
        sampled: dict[int, list[int]] = {}
        for chunk in plan.chunks:
            row = self.rows[chunk.row]
            for position in range(chunk.start, chunk.start + chunk.length):
                self._write(row, position)
            if chunk.sample:
                assert chunk.start + chunk.length == len(row.tokens)
                sampled[chunk.row] = [self._sample(row)]
        for _ in range(steps):
            for index in plan.decodes:
                row = self.rows[index]
                self._write(row, len(row.tokens) - 1)
                sampled.setdefault(index, []).append(self._sample(row))
        rows = [self._answer(index, tokens) for index, tokens in sampled.items()]
        return PlanResult(op=plan.op, steps=steps, rows=rows, elapsed_us=1)

    def _answer(self, index: int, tokens: list[int]) -> RowTokens:
        seq = self.rows[index].seq
        error = self.errors.pop(seq, None)
        return RowTokens(index, seq, [] if error else tokens, None, error)

    def _read(self, row: Row, positions: int) -> None:
        for position, digest in enumerate(prefix_digests(row.tokens[:positions])):
            page = row.pages[position // self.block_size]
            held = self.slots.get((page, position % self.block_size))
            assert held == digest, f"sequence {row.seq}: page {page} does not hold the K/V of position {position}"

    def _write(self, row: Row, position: int) -> None:
        self._read(row, position)
        page = row.pages[position // self.block_size]
        others = [other.seq for other in self.rows.values() if other is not row and page in other.pages]
        assert not others, f"sequence {row.seq} writes page {page}, which {others} read"
        self.slots[page, position % self.block_size] = prefix_digests(row.tokens[: position + 1])[-1]
        self.positions_computed += 1

    def _sample(self, row: Row) -> int:
        position = len(row.tokens) - 1
        token = next_token(self.slots[row.pages[position // self.block_size], position % self.block_size])
        row.tokens.append(token)
        return token

    def write_remote(self, pages: list[int], tokens: list[int], positions: range) -> None:
        """A transfer from elsewhere lands."""
        digests = prefix_digests(tokens)
        for position in positions:
            page = pages[position // self.block_size]
            self.slots[page, position % self.block_size] = digests[position]
