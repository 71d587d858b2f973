"""A plan while it is being made, and while it is in flight. Used by the batch planner alone."""

from __future__ import annotations

from segue.plan import BatchPlan, Chunk, RowStart
from segue.sequence import Sequence


class PlanDraft:
    """What one plan will do, and how much of its token budget is left.

    Decodes come first: chunks get what the `decodes_likely` running decodes leave. If the oldest sequence is prefilling
    (`reserve_chunk`), one token is kept for it, so that it advances even where decodes fill the budget.

    `tokens_saturating` (0: no such bound) is how many tokens, chunks and decodes together, keep the device busy: more
    would only delay whoever waits for the step. It binds where somebody does: where decodes run, and from the second
    chunk on. A prompt that is alone gets all of the budget, as few long chunks are the fastest. However many the
    decodes, chunks may have half of it.
    """

    def __init__(
        self, op: int, budget: int, decodes_likely: int, reserve_chunk: bool, tokens_saturating: int = 0
    ) -> None:
        self.op = op
        self._chunks_saturating = max(tokens_saturating - decodes_likely, (tokens_saturating + 1) // 2)
        self._binds = decodes_likely > 0
        self._tokens_chunks = 0
        self.budget = budget
        self.budget_chunks = max(budget - decodes_likely, int(reserve_chunk))
        self.budget_decodes = min(decodes_likely, budget - int(reserve_chunk))
        self.copies: list[tuple[int, int]] = []
        self.starts: list[Sequence] = []
        self.grows: dict[int, list[int]] = {}
        self.chunks: list[tuple[Sequence, int]] = []
        self.decodes: list[Sequence] = []
        self.steps = 1

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decodes)

    @property
    def is_saturated(self) -> bool:
        """Whether more chunks would only delay those already in the step."""
        return bool(self.chunks) and 0 < self._chunks_saturating <= self._tokens_chunks

    @property
    def chunk_room(self) -> int:
        """Tokens that the next chunk may have, 0 or less for none."""
        if not self._chunks_saturating or not (self.chunks or self._binds):
            return self.budget_chunks
        return min(self.budget_chunks, self._chunks_saturating - self._tokens_chunks)

    def add_chunk(self, seq: Sequence, length: int) -> None:
        self.chunks.append((seq, length))
        self._tokens_chunks += length
        self.budget -= length
        self.budget_chunks -= length

    def add_decode(self, seq: Sequence) -> None:
        self.decodes.append(seq)
        self.budget -= 1
        self.budget_decodes -= 1

    def grow(self, seq: Sequence, pages: list[int]) -> None:
        """Note pages appended to the block table of a sequence that has a row."""
        self.grows.setdefault(_row(seq), []).extend(pages)

    def launch(self, ends: list[int]) -> tuple[BatchPlan, PlanInFlight]:
        """Book the work on its sequences and write it down for the engine."""
        flight = PlanInFlight(self.op, self.steps, self.decodes, [[source] for source, _ in self.copies])
        starts = [
            RowStart(
                _row(seq),
                seq.seq,
                list(seq.tokens),
                seq.tokens_prompt,
                seq.scheduled,
                list(seq.pages),
                seq.sampling,
            )
            for seq in self.starts
        ]
        for seq in self.starts:
            self.grows.pop(_row(seq), None)  # a start carries the whole table
        chunks = [self._launch_chunk(seq, length, flight) for seq, length in self.chunks]
        rows = []
        for seq in self.decodes:
            seq.scheduled += self.steps
            seq.pending += self.steps
            seq.op = self.op
            rows.append(_row(seq))
        plan = BatchPlan(
            op=self.op,
            ends=ends,
            copies=self.copies,
            starts=starts,
            grows=list(self.grows.items()),
            chunks=chunks,
            decodes=rows,
            steps_max=self.steps,
        )
        return plan, flight

    def _launch_chunk(self, seq: Sequence, length: int, flight: PlanInFlight) -> Chunk:
        start = seq.scheduled
        sample = start + length == len(seq.tokens)
        seq.scheduled += length
        seq.pending += int(sample)
        seq.op = self.op
        flight.chunks.append((seq, seq.scheduled, sample))
        return Chunk(_row(seq), start, length, sample)


class PlanInFlight:
    """What the planner remembers of a launched plan, and what must wait for its result."""

    __slots__ = ("chunks", "decodes", "op", "pages_held", "preempted", "rows", "steps")

    def __init__(self, op: int, steps: int, decodes: list[Sequence], pages_held: list[list[int]]) -> None:
        self.op = op
        self.steps = steps
        self.decodes = decodes
        self.chunks: list[tuple[Sequence, int, bool]] = []
        """(sequence, positions computed afterwards, whether it samples)."""
        self.pages_held = pages_held
        """Pages that the plan reads or writes for nobody any more: held until it lands, then released."""
        self.rows: list[int] = []
        """Rows that are free once it lands."""
        self.preempted: list[Sequence] = []


def _row(seq: Sequence) -> int:
    assert seq.row is not None, "only sequences with a row are drafted"
    return seq.row
