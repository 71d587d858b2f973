"""Which sequences exist, in which queue, and when their pages and rows may be given away.

The rule that must not be broken: whatever a plan in flight names stays as it is until that plan has landed. A sequence
that ends or is preempted meanwhile leaves its pages behind as *held*, and its row as taken, on the record of the last
plan that names it; `landed` returns them to the pool and to the free rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush

from segue.block_pool import BlockPool
from segue.errors import InternalError
from segue.plan_draft import PlanInFlight
from segue.sequence import SeqState, Sequence


class SequenceTable:
    """Owner of every sequence record, the row slots and the plans in flight; `pool` is shared with the planner."""

    def __init__(self, pool: BlockPool, rows_total: int) -> None:
        self._pool = pool
        self.by_id: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        """Sequences that own pages and compute, oldest first; some may still lack a row."""
        self.waiting: list[Sequence] = []
        """Oldest first."""
        self.flights: deque[PlanInFlight] = deque()
        self.rows_free = list(range(rows_total))
        """A heap: low rows first keeps the batch dense."""
        self.rows_ended: list[int] = []
        """Freed rows that the engine has not been told about."""
        self.preemptions = 0

    # -- coming and going

    def insert_waiting(self, seq: Sequence) -> None:
        self.by_id[seq.seq] = seq
        insort(self.waiting, seq, key=_age)

    def insert_running(self, seq: Sequence) -> None:
        seq.move(SeqState.RUNNING)
        self.by_id[seq.seq] = seq
        insort(self.running, seq, key=_age)

    def bind_row(self, seq: Sequence) -> None:
        seq.row = heappop(self.rows_free)

    def park(self, seq: Sequence) -> None:
        """A running sequence stops for good and keeps its pages."""
        _remove(self.running, seq)
        seq.move(SeqState.PARKED)
        self._give_row(seq)

    def end(self, seq: Sequence) -> None:
        if seq.state is SeqState.RUNNING:
            _remove(self.running, seq)
        elif seq.state is SeqState.WAITING:
            _remove(self.waiting, seq)
        seq.move(SeqState.ENDED)
        del self.by_id[seq.seq]
        self._give_row(seq)
        self._give_pages(seq)

    def preempt(self, seq: Sequence) -> None:
        """Back to waiting; at once if no plan in flight names the sequence, else when the last one has landed."""
        self.preemptions += 1
        _remove(self.running, seq)
        flight = self.flight_of(seq)
        if flight is None:
            self._requeue(seq)
        else:
            seq.move(SeqState.PREEMPTING)
            flight.preempted.append(seq)

    def youngest_preemptible(self, older: Sequence | None) -> Sequence | None:
        """The youngest running sequence behind `older` (or behind the oldest of all) that may be preempted."""
        limit = (older or self.running[0]).age if self.running else (0, 0)
        for seq in reversed(self.running):
            if seq.age <= limit:
                return None
            if not seq.prefill_only:
                return seq
        return None

    def _requeue(self, seq: Sequence) -> None:
        if seq.pending:
            raise InternalError(f"sequence {seq.seq} requeued with {seq.pending} tokens in flight")
        self._give_row(seq)
        self._give_pages(seq)
        seq.scheduled = seq.computed = seq.blocks_published = 0
        seq.move(SeqState.WAITING)
        insort(self.waiting, seq, key=_age)

    def _give_row(self, seq: Sequence) -> None:
        if seq.row is None:
            return
        flight = self.flight_of(seq)
        if flight is None:
            self._free_row(seq.row)
        else:
            flight.rows.append(seq.row)
        seq.row = None

    def _free_row(self, row: int) -> None:
        heappush(self.rows_free, row)
        self.rows_ended.append(row)

    def _give_pages(self, seq: Sequence) -> None:
        pages, seq.pages = seq.pages, []
        flight = self.flight_of(seq)
        if flight is None:
            self._pool.release(pages)
        else:
            self._pool.hold(pages)
            flight.pages_held.append(pages)

    # -- plans in flight

    def flight_of(self, seq: Sequence) -> PlanInFlight | None:
        """The last plan in flight that names the sequence."""
        flights = self.flights
        if not flights or seq.op < flights[0].op:
            return None
        return flights[seq.op - flights[0].op]

    def landed(self, flight: PlanInFlight) -> None:
        """Give away what waited for this plan."""
        for pages in flight.pages_held:
            self._pool.unhold(pages)
            self._pool.release(pages)
        for row in flight.rows:
            self._free_row(row)
        for seq in flight.preempted:
            if seq.state is SeqState.PREEMPTING:
                self._requeue(seq)

    def pages_coming(self) -> int:
        """At most this many pages become allocatable by plans landing."""
        return sum(
            sum(len(pages) for pages in flight.pages_held)
            + sum(len(seq.pages) for seq in flight.preempted if seq.state is SeqState.PREEMPTING)
            for flight in self.flights
        )

    # -- invariants

    def check(self) -> None:
        """Raise InternalError where queues, rows or counters contradict each other."""
        for queue, state in ((self.running, SeqState.RUNNING), (self.waiting, SeqState.WAITING)):
            if any(seq.state is not state for seq in queue) or queue != sorted(queue, key=_age):
                raise InternalError(f"the {state.value} queue is out of order or holds another state")
            if len(queue) != sum(1 for seq in self.by_id.values() if seq.state is state):
                raise InternalError(f"a {state.value} sequence is missing from its queue")
        rows = [seq.row for seq in self.by_id.values() if seq.row is not None]
        rows += self.rows_free + [row for flight in self.flights for row in flight.rows]
        if len(rows) != len(set(rows)):
            raise InternalError("a row has two owners")
        for seq in self.by_id.values():
            if not seq.computed <= seq.scheduled <= seq.tokens_expected:
                raise InternalError(f"sequence {seq.seq}: {seq.computed=} {seq.scheduled=} {seq.tokens_expected=}")
            if seq.pending and self.flight_of(seq) is None:
                raise InternalError(f"sequence {seq.seq} waits for tokens of no plan")


def _age(seq: Sequence) -> tuple[int, int]:
    return seq.age


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    index = bisect_left(queue, seq.age, key=_age)
    if queue[index] is not seq:
        raise InternalError(f"sequence {seq.seq} is not in its queue")
    del queue[index]
