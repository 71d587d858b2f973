"""How much prefill time and how much memory is wanted of late: what a microsecond, or a page, costs those who wait.

**Prefill time.** By Little's law as many requests will arrive while the present queue drains as have arrived while it
built up, so whoever takes prefill time now delays about as many requests as wait on average. A single look says little,
because a queue that happens to be empty is no promise; hence the mean over some seconds.

**Memory.** A request keeps its pages for the whole of its answer, long after the decision, so the present fullness says
little as well. By Little's law again the pages in use will be the rate at which pages are booked times how long they
stay: `pressure` is that, as a share of all pages. What is booked beyond the pool waits until a longer answer ends: an
answer's time for each part of the pool that is wanted in excess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from conductor.core.instance import Instance
from conductor.core.pricing import loss_slope

MEAN_OVER_US = 10_000_000

FULL_POWER = 8
"""How likely a pool that is filled to some share is full when the next request comes: 1/2 at 92 %, 1/10 at 75 %."""


RATE_OVER = 32


class _Mean:
    """Exponential mean over MEAN_OVER_US; what is seen first counts in full."""

    __slots__ = ("_at_us", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._at_us: int | None = None

    def look(self, now_us: int, value: float) -> None:
        fresh = 1.0 if self._at_us is None else 1.0 - math.exp((self._at_us - now_us) / MEAN_OVER_US)
        self.value += fresh * (value - self.value)
        self._at_us = now_us


class PrefillDemand:
    """On one pool of instances that prefill."""

    def __init__(self) -> None:
        self._waiting = _Mean()
        self._wait_us = _Mean()

    def look(self, now_us: int, pool: Sequence[Instance], requests_held: int) -> None:
        """`requests_held` wait in the Conductor, for any of the pool."""
        if not pool:
            return
        queues = [instance.prefill_work for instance in pool if len(instance.prefill_work)]
        self._waiting.look(now_us, (sum(map(len, queues)) + requests_held) / len(pool))
        self._wait_us.look(now_us, sum(queue.remaining_us(now_us) for queue in queues) / len(pool))

    def loss_per_us(self, target_us: float) -> float:
        """To those who wait behind it, of one microsecond of prefill time."""
        return self._waiting.value * self.slope(target_us)

    def slope(self, target_us: float) -> float:
        """Loss of one microsecond more that a request waits."""
        return loss_slope(self._wait_us.value / target_us) / target_us


class MemoryDemand:
    """On one pool of instances that decode. The rate is that of some RATE_OVER requests: a wave of them is
    noticed before it has filled the pool."""

    def __init__(self) -> None:
        self._pages_seen = 0
        self._requests_seen = 0
        self._seen_us: int | None = None
        self._us = 0.0
        self._pages = 0.0
        self._requests = 0.0
        self._used = 0.0
        self._stay_us = 0.0
        self.pressure = 0.0
        """Pages that will be in use, as a share of the pool's; above 1 some of them will be waited for. Those that are
        shared stay for as long as others come to share them."""

    def look(self, now_us: int, pool: Sequence[Instance], stay_us: float) -> None:
        """`stay_us`: how long an answer takes, and with it its pages."""
        pages = requests = total = lasting = used = 0
        for each in pool:
            pages += each.pages_taken
            requests += each.rows_taken
            total += each.manifest.pages_total
            lasting += each.pages_shared + each.others_pages
            used += each.booked_pages + each.others_pages
        total = total or 1
        self._stay_us = stay_us
        if self._seen_us is not None:
            booked = max(0, requests - self._requests_seen)
            kept = math.exp(-booked / RATE_OVER)
            self._us = self._us * kept + now_us - self._seen_us
            self._pages = self._pages * kept + max(0, pages - self._pages_seen)
            self._requests = self._requests * kept + booked
        self._seen_us, self._pages_seen, self._requests_seen = now_us, pages, requests
        self._used = used / total
        stayed = stay_us / self._us if self._has_rate else 0.0
        self.pressure = (lasting + self._pages * stayed) / total

    def arrivals(self, us: float, instances: int) -> float:
        """Requests that land on one of so many instances within `us`."""
        rate = self._requests / self._us if self._has_rate else 0.0
        return rate * us / max(instances, 1)

    def drain_us(self, pages: int, instance: Instance) -> float:
        """Until so many pages have left: all of them do within an answer's time."""
        return pages / instance.manifest.pages_total * self._stay_us

    @property
    def _has_rate(self) -> bool:
        return self._requests > RATE_OVER / 4 and self._us > 0.0

    def loss(self, pages: int, instance: Instance, target_us: float) -> float:
        """To those who come in the meantime, of `pages` more that stay at `instance` for an answer's time.

        `fullness / share` of them come within that time, where `share` is what one takes of the pool; each is met by a
        pool that is `pages / total` fuller.
        """
        total = instance.manifest.pages_total
        own = max(self._pages / self._requests, 1.0) if self._has_rate else float(max(pages, 1))
        fullness = max(self.pressure, self._used) + instance.pages_used / total - self._used
        if fullness <= 0.0:
            return 0.0
        return fullness * pages / own * self._waiting_slope(fullness, own / total, target_us)

    def _waiting_slope(self, fullness: float, share: float, target_us: float) -> float:
        """Loss per fullness: how likely the pool is full, times what the longer wait for room loses then.

        The wait is that of a queue with 1 / share places over one answer's time T: T share / (1 - fullness) well below
        1, T (fullness - 1) well above it, and between them the coordinate transformation that joins the two.
        """
        over = fullness - 1.0
        root = math.sqrt(over * over + 4.0 * share)
        wait_us = self._stay_us * (over + root) / 2.0
        longer_us = self._stay_us * (1.0 + over / root) / 2.0
        return min(fullness, 1.0) ** FULL_POWER * loss_slope(wait_us / target_us) * longer_us / target_us
