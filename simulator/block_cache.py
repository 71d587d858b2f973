"""Hit rate of one pool of prefix blocks by eviction policy and capacity (claim C1; Mooncake, Table 1).

A request hits the longest prefix of its blocks that is in the pool; then all its blocks are in the pool, each of which
evicts one when it is full. Policies say which block goes first:

    lru           the one used longest ago; of one request the last block first
    lfu           the one used least often, then as lru
    length-aware  the one used least often, then the one furthest back in its prompt
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

import msgspec

Score = tuple[int, ...]
"""The least one goes first."""


class HitRate(msgspec.Struct, frozen=True):
    blocks: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def _lru(clock: int, uses: int, place: int) -> Score:
    return (clock, -place)


def _lfu(clock: int, uses: int, place: int) -> Score:
    return (uses, clock, -place)


def _length_aware(clock: int, uses: int, place: int) -> Score:
    return (uses, -place, clock)


POLICIES: dict[str, Callable[[int, int, int], Score]] = {"lru": _lru, "lfu": _lfu, "length-aware": _length_aware}


class BlockCache:
    """`capacity` None: unbounded. Uses are counted while a block is in the pool."""

    def __init__(self, policy: str, capacity: int | None) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"a pool needs a block, got capacity {capacity}")
        self._score = POLICIES[policy]
        self._capacity = capacity
        self._held: dict[int, tuple[Score, int]] = {}
        """Block -> (present score, uses)."""
        self._heap: list[tuple[Score, int]] = []
        """With outdated entries, which are skipped."""
        self._clock = 0

    def use(self, blocks: Sequence[int]) -> int:
        """One request; how many of its leading blocks were there."""
        hits = 0
        while hits < len(blocks) and blocks[hits] in self._held:
            hits += 1
        self._clock += 1
        for place, block in enumerate(blocks):
            self._touch(block, place)
        return hits

    def _touch(self, block: int, place: int) -> None:
        uses = self._held[block][1] + 1 if block in self._held else 1
        if uses == 1 and self._capacity is not None and len(self._held) >= self._capacity:
            self._evict()
        score = self._score(self._clock, uses, place)
        self._held[block] = (score, uses)
        if self._capacity is None:
            return
        heappush(self._heap, (score, block))
        if len(self._heap) > 4 * len(self._held) + 64:
            self._heap = [(score, block) for block, (score, _) in self._held.items()]
            heapify(self._heap)

    def _evict(self) -> None:
        while True:
            score, block = heappop(self._heap)
            if self._held.get(block, (None, 0))[0] == score:
                del self._held[block]
                return


def hit_rate(requests: Iterable[Sequence[int]], policy: str, capacity: int | None) -> HitRate:
    cache = BlockCache(policy, capacity)
    blocks = hits = 0
    for request in requests:
        hits += cache.use(request)
        blocks += len(request)
    return HitRate(blocks, hits)
