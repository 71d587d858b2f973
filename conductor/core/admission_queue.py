"""Attempts that wait for room: bounded, first come first served within a priority.

One lane per (model, KV root), because a full pool of one model must not hold up another. Within a lane the order is
(priority, re-planned before new, arrival); only the head is tried, so that a large request is not starved by small
ones that slip past it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from conductor.core.events import RequestArrived

WAIT_US_MAX = 120_000_000
"""Longest wait for room; past it the client is better served by an honest answer."""

Lane = tuple[str, bytes]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestArrived
    queued_us: int
    client_deadline_us: int
    """0: none."""
    expires_us: int
    """The earlier of the client's deadline and the longest wait."""

    @property
    def rank(self) -> tuple[int, bool]:
        return (self.request.priority, self.request.attempt == 1)

    @property
    def lane(self) -> Lane:
        return (self.request.model, self.request.kv_root)


class AdmissionQueue:
    """`len` is the number of waiting attempts; the owner keeps it at or below its maximum."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._lanes: dict[Lane, dict[tuple[int, bool], OrderedDict[str, Waiting]]] = {}
        self._expiries: list[tuple[int, str, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def get(self, request_id: str) -> Waiting | None:
        return self._waiting.get(request_id)

    def push(self, request: RequestArrived, now_us: int) -> None:
        deadline_us = now_us + request.deadline_us if request.deadline_us else 0
        limit_us = now_us + WAIT_US_MAX
        waiting = Waiting(
            request=request,
            queued_us=now_us,
            client_deadline_us=deadline_us,
            expires_us=min(deadline_us, limit_us) if deadline_us else limit_us,
        )
        self._waiting[request.request_id] = waiting
        ranks = self._lanes.setdefault(waiting.lane, {})
        ranks.setdefault(waiting.rank, OrderedDict())[request.request_id] = waiting
        heapq.heappush(self._expiries, (waiting.expires_us, request.request_id, request.attempt))

    def remove(self, request_id: str) -> Waiting | None:
        """Take it out, wherever it stands; None when it does not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            ranks = self._lanes[waiting.lane]
            del ranks[waiting.rank][request_id]
            if not ranks[waiting.rank]:
                del ranks[waiting.rank]
            if not ranks:
                del self._lanes[waiting.lane]
        return waiting

    def lanes(self) -> list[Lane]:
        return list(self._lanes)

    def head(self, lane: Lane) -> Waiting | None:
        ranks = self._lanes.get(lane)
        return next(iter(ranks[min(ranks)].values())) if ranks else None

    def in_lane(self, lane: Lane) -> Iterator[Waiting]:
        """All of a lane in order, over a copy."""
        ranks = self._lanes.get(lane, {})
        return iter([waiting for rank in sorted(ranks) for waiting in ranks[rank].values()])

    def expired(self, now_us: int) -> list[Waiting]:
        """Take out and return what has waited too long."""
        late = []
        while self._expiries and self._settled_expiry() is not None and self._expiries[0][0] <= now_us:
            waiting = self.remove(heapq.heappop(self._expiries)[1])
            assert waiting is not None, "a settled expiry belongs to a waiting request"
            late.append(waiting)
        return late

    def next_expiry(self) -> int | None:
        return self._settled_expiry()

    def check(self) -> None:
        in_lanes = [id_ for ranks in self._lanes.values() for queue in ranks.values() for id_ in queue]
        assert sorted(in_lanes) == sorted(self._waiting), "lanes and index disagree"
        assert all(queue for ranks in self._lanes.values() for queue in ranks.values()), "an empty rank is kept"

    def _settled_expiry(self) -> int | None:
        """The earliest expiry of a request that still waits; entries of others are dropped on the way."""
        while self._expiries:
            expires_us, request_id, attempt = self._expiries[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.request.attempt == attempt and waiting.expires_us == expires_us:
                return expires_us
            heapq.heappop(self._expiries)
        return None
