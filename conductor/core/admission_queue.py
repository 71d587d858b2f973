"""Attempts that wait for room: bounded, by priority, re-planned before new, tenants by fair share, each by arrival.

One lane per (model, KV root), because a full pool of one model must not hold up another. Within a lane the order is
(priority, re-planned before new, least served tenant, arrival); only the head is tried, so that a large request is not
starved by small ones that slip past it. When the queue is full, whoever fills it makes room: the last request of the
tenant that waits with most for its weight, among the least urgent.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

from conductor.core.events import RequestArrived
from conductor.core.fair_share import FairShare

WAIT_US_MAX = 120_000_000
"""Longest wait for room; past it the client is better served by an honest answer."""

Lane = tuple[str, bytes]
Rank = tuple[int, bool]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestArrived
    queued_us: int
    client_deadline_us: int
    """0: none."""
    expires_us: int
    """The earliest of the client's deadline, the longest wait, and `budget_us` after arrival."""
    budget_us: int = 0
    """Time to the first token that its objective leaves; 0: none."""
    prefill_us: float = 0.0
    """Predicted, of the whole prompt."""

    @property
    def rank(self) -> Rank:
        return (self.request.priority, self.request.attempt == 1)

    @property
    def lane(self) -> Lane:
        return (self.request.model, self.request.kv_root)

    @property
    def tenant(self) -> str:
        return self.request.tenant


class _Class:
    """Attempts of one rank in one lane, by tenant."""

    __slots__ = ("count", "prefill_us", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, OrderedDict[str, Waiting]] = {}
        self.prefill_us = 0.0
        self.count = 0

    def add(self, waiting: Waiting) -> None:
        self.tenants.setdefault(waiting.tenant, OrderedDict())[waiting.request.request_id] = waiting
        self.prefill_us += waiting.prefill_us
        self.count += 1

    def drop(self, waiting: Waiting) -> None:
        own = self.tenants[waiting.tenant]
        del own[waiting.request.request_id]
        if not own:
            del self.tenants[waiting.tenant]
        self.count -= 1
        self.prefill_us = self.prefill_us - waiting.prefill_us if self.count else 0.0

    def __iter__(self) -> Iterator[Waiting]:
        return (waiting for own in self.tenants.values() for waiting in own.values())


class AdmissionQueue:
    """`len` is the number of waiting attempts; the owner keeps it at or below its maximum. `weights` are those of
    tenants, 1 where not given."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._waiting: dict[str, Waiting] = {}
        self._lanes: dict[Lane, dict[Rank, _Class]] = {}
        self._shares: dict[str, FairShare] = {}
        self._expiries: list[tuple[int, str, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def get(self, request_id: str) -> Waiting | None:
        return self._waiting.get(request_id)

    def push(self, request: RequestArrived, now_us: int, *, budget_us: int = 0, prefill_us: float = 0.0) -> Waiting:
        deadline_us = now_us + request.deadline_us if request.deadline_us else 0
        ends = [now_us + WAIT_US_MAX, deadline_us, now_us + budget_us if budget_us else 0]
        waiting = Waiting(
            request=request,
            queued_us=now_us,
            client_deadline_us=deadline_us,
            expires_us=min(end_us for end_us in ends if end_us),
            budget_us=budget_us,
            prefill_us=prefill_us,
        )
        self._waiting[request.request_id] = waiting
        self._lanes.setdefault(waiting.lane, {}).setdefault(waiting.rank, _Class()).add(waiting)
        self._share(request.model).enter(waiting.tenant)
        heapq.heappush(self._expiries, (waiting.expires_us, request.request_id, request.attempt))
        return waiting

    def remove(self, request_id: str) -> Waiting | None:
        """Take it out, wherever it stands; None when it does not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            classes = self._lanes[waiting.lane]
            classes[waiting.rank].drop(waiting)
            self._share(waiting.request.model).leave(waiting.tenant)
            if not classes[waiting.rank].count:
                del classes[waiting.rank]
            if not classes:
                del self._lanes[waiting.lane]
        return waiting

    def charge(self, waiting: Waiting, gpu_us: float) -> None:
        """It was taken out to be served, and will take so much."""
        self._share(waiting.request.model).charge(waiting.tenant, gpu_us)

    def lanes(self) -> list[Lane]:
        return list(self._lanes)

    def head(self, lane: Lane) -> Waiting | None:
        classes = self._lanes.get(lane)
        if not classes:
            return None
        tenants = classes[min(classes)].tenants
        heads = [next(iter(own.values())) for own in tenants.values()]
        if len(heads) == 1:
            return heads[0]
        share = self._share(lane[0])
        return min(heads, key=lambda waiting: (share.counter(waiting.tenant), waiting.queued_us))

    def in_lane(self, lane: Lane) -> Iterator[Waiting]:
        """All of a lane, the most urgent first, over a copy."""
        classes = self._lanes.get(lane, {})
        return iter([waiting for rank in sorted(classes) for waiting in classes[rank]])

    def ahead(self, waiting: Waiting) -> tuple[int, float]:
        """Attempts that are served before `waiting` should all stay, and their predicted prefill: those of more urgent
        ranks, and of its own rank what its tenant's share lets pass."""
        classes = self._lanes.get(waiting.lane, {})
        count, prefill_us = 0, 0.0
        for rank, attempts in classes.items():
            if rank < waiting.rank:
                count, prefill_us = count + attempts.count, prefill_us + attempts.prefill_us
        peers = classes[waiting.rank]
        own = peers.tenants[waiting.tenant]
        if len(own) == peers.count:
            return count + peers.count - 1, prefill_us + peers.prefill_us - waiting.prefill_us
        share = self._share(waiting.request.model)
        others = share.weight_waiting / share.weight(waiting.tenant)
        own_us = sum(each.prefill_us for each in own.values()) - waiting.prefill_us
        count += min(int((len(own) - 1) * others), peers.count - 1)
        return count, prefill_us + min(own_us * others, peers.prefill_us - waiting.prefill_us)

    def waiting_of(self, model: str, tenant: str) -> int:
        return self._share(model).waiting(tenant)

    def displaced_by(self, request: RequestArrived) -> Waiting | None:
        """Who has to make room for `request` in a full queue; None: `request` itself has no better claim. A stream that
        runs already is never displaced."""
        lane = (request.model, request.kv_root)
        classes = self._lanes.get(lane, {})
        rank = max((rank for rank in classes if rank[1]), default=None)
        own_rank = (request.priority, request.attempt == 1)
        if rank is None or rank < own_rank:
            return None
        share = self._share(request.model)
        tenants = classes[rank].tenants
        fullest = max(tenants, key=lambda tenant: (len(tenants[tenant]) / share.weight(tenant), tenant))
        if rank == own_rank:
            own = (len(tenants.get(request.tenant, ())) + 1) / share.weight(request.tenant)
            if len(tenants[fullest]) / share.weight(fullest) <= own:
                return None
        return next(reversed(tenants[fullest].values()))

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
        in_lanes = [
            waiting.request.request_id
            for classes in self._lanes.values()
            for attempts in classes.values()
            for waiting in attempts
        ]
        assert sorted(in_lanes) == sorted(self._waiting), "lanes and index disagree"
        for classes in self._lanes.values():
            assert classes, "an empty lane is kept"
            for attempts in classes.values():
                assert attempts.count == sum(len(own) for own in attempts.tenants.values()) > 0, "a class miscounts"

    def _share(self, model: str) -> FairShare:
        return self._shares.setdefault(model, FairShare(self._weights))

    def _settled_expiry(self) -> int | None:
        """The earliest expiry of a request that still waits; entries of others are dropped on the way."""
        while self._expiries:
            expires_us, request_id, attempt = self._expiries[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.request.attempt == attempt and waiting.expires_us == expires_us:
                return expires_us
            heapq.heappop(self._expiries)
        return None
