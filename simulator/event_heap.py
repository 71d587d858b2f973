"""The virtual clock: actions ordered by (time, rank, sequence). Nothing else moves time."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush


class Rank(IntEnum):
    """What goes first among things that happen in the same microsecond."""

    ENGINE = 0
    NETWORK = 1
    ARRIVAL = 2
    WORKER = 3
    CONDUCTOR = 4
    TIMER = 5


class EventHeap:
    """Actions run in order; an action may push more, never into the past."""

    def __init__(self) -> None:
        self.now_us = 0
        self.executed = 0
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._sequence = 0

    def push(self, at_us: int, rank: Rank, action: Callable[[], None]) -> None:
        assert at_us >= self.now_us, "an event in the past"
        self._sequence += 1
        heappush(self._heap, (at_us, rank, self._sequence, action))

    def run_next(self) -> bool:
        """Run the earliest action; False when there is none."""
        if not self._heap:
            return False
        self.now_us, _, _, action = heappop(self._heap)
        self.executed += 1
        action()
        return True

    def run_until(self, end_us: int) -> None:
        """Run everything up to and including `end_us`."""
        while self._heap and self._heap[0][0] <= end_us:
            self.run_next()
        self.now_us = max(self.now_us, end_us)

    @property
    def next_us(self) -> int | None:
        return self._heap[0][0] if self._heap else None
