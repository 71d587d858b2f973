"""Weighted fair share among tenants, in predicted GPU time: start-time fair queueing (Goyal, Vin and Cheng 1996) with
virtual counters as in VTC (Sheng et al. 2024).

Each tenant has a counter of GPU time over weight; whoever waits with the least is served next and charged. A tenant
that comes back from idleness starts at the counter of the one served last: idling earns no credit.
"""

from __future__ import annotations

from collections.abc import Mapping

TENANTS_MAX = 4_096
"""Counters kept. Past it those of idle tenants that are closest to what they would start with again are dropped."""


class FairShare:
    """`weights` by tenant; others have 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._now = 0.0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    @property
    def weight_waiting(self) -> float:
        """Of all tenants that wait."""
        return sum(self.weight(tenant) for tenant in self._waiting)

    def counter(self, tenant: str) -> float:
        """The least is served next."""
        return self._counters.get(tenant, self._now)

    def enter(self, tenant: str) -> None:
        """One more request of `tenant` waits."""
        if tenant not in self._waiting:
            self._counters[tenant] = max(self.counter(tenant), self._now)
            self._forget_idle()
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One waits no more, whatever became of it."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def charge(self, tenant: str, gpu_us: float) -> None:
        """One of its requests is served now and will take so much."""
        start = self.counter(tenant)
        self._now = max(self._now, start)
        self._counters[tenant] = start + gpu_us / self.weight(tenant)

    def waiting(self, tenant: str) -> int:
        return self._waiting.get(tenant, 0)

    def _forget_idle(self) -> None:
        if len(self._counters) <= TENANTS_MAX:
            return
        idle = [tenant for tenant in self._counters if tenant not in self._waiting]
        idle.sort(key=lambda tenant: (self._counters[tenant], tenant))
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._counters[tenant]
