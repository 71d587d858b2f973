"""How fast K/V moves between two instances, learned from transfers that have finished.

The rate of a pair is the decayed ratio of bytes to time of its own transfers, in which contention is included; a pair
that is not known yet is taken to be like the pairs that are, and before anything was moved like `prior`.
"""

from __future__ import annotations

from segue.cost_model import LinkCost

PRIOR = LinkCost(latency_us=500.0, bytes_per_us=2_000.0)
"""2 GB/s: a copy through host memory, or a shared 25 Gbit/s network. Wrong by less than ten either way."""

BYTES_WEIGHED = 1 << 28
"""A pair's memory: what was moved before the last quarter of a gigabyte counts for little."""

LINKS_MAX = 1 << 16
"""Pairs remembered: 256 x 256. Past it the oldest are forgotten."""


class LinkBook:
    def __init__(self, prior: LinkCost = PRIOR) -> None:
        self._prior = prior
        self._all = _Rate(prior.bytes_per_us)
        self._pairs: dict[tuple[str, str], _Rate] = {}

    def note(self, source: str, target: str, size_bytes: float, elapsed_us: float) -> None:
        """A transfer from `source` to `target` has finished. Times below the latency say nothing about the rate."""
        moving_us = elapsed_us - self._prior.latency_us
        if size_bytes <= 0 or moving_us <= 0:
            return
        rate = self._pairs.get((source, target))
        if rate is None:
            if len(self._pairs) >= LINKS_MAX:
                del self._pairs[next(iter(self._pairs))]
            rate = self._pairs[source, target] = _Rate(self._all.bytes_per_us)
        rate.learn(size_bytes, moving_us)
        self._all.learn(size_bytes, moving_us)

    def us(self, source: str, target: str, size_bytes: float) -> float:
        """Predicted time to move `size_bytes`; 0 for nothing."""
        if size_bytes <= 0:
            return 0.0
        rate = self._pairs.get((source, target), self._all)
        return self._prior.latency_us + size_bytes / rate.bytes_per_us


class _Rate:
    """Decayed bytes over decayed time, begun with one transfer's worth of what is believed already."""

    __slots__ = ("_bytes", "_us", "bytes_per_us")

    def __init__(self, bytes_per_us: float) -> None:
        self.bytes_per_us = bytes_per_us
        self._bytes = BYTES_WEIGHED / 16
        self._us = self._bytes / bytes_per_us

    def learn(self, size_bytes: float, us: float) -> None:
        kept = max(0.0, 1.0 - size_bytes / BYTES_WEIGHED)
        self._bytes = self._bytes * kept + size_bytes
        self._us = self._us * kept + us
        self.bytes_per_us = self._bytes / self._us
