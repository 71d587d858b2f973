"""What an evicted block is worth: the probability that it is wanted again before it would have left anyway.

Theory. A block that is stored pushes the oldest of its instance out (LRU). Had there been room for one block more, the
one pushed out would have stayed for another turnover of the cache. So the value of a cached block at the margin is the
share of blocks that are asked for again within one turnover after they were evicted, times what it costs to compute
them. Both are observed: the blocks whose last copy left are remembered (as ghosts) for about one turnover, and an
arriving prompt whose prefix ends in front of a ghost has missed it.

Blocks that another instance still holds cost nothing when they go; they count as evicted and never as missed, which is
why replicas make eviction cheap until they are the ones that push last copies out.
"""

from __future__ import annotations

from collections.abc import Sequence

GHOSTS_MAX = 1 << 17
"""Evicted blocks remembered, about 20 MB. A cluster that caches more sees a shorter span than a turnover;
the share is extrapolated, as if misses went on at the same rate."""

EVICTIONS_WEIGHED = 4096
"""How many evictions back the share is taken over."""

SHARE_PRIOR = 0.25
"""Before anything was evicted: chat traces reuse between a third and a half of their blocks, mostly the young ones."""

PRIOR_EVICTIONS = 64


class ReuseBook:
    def __init__(self) -> None:
        self._ghosts: dict[bytes, None] = {}
        self._evicted = float(PRIOR_EVICTIONS)
        self._missed = SHARE_PRIOR * PRIOR_EVICTIONS

    def note_evicted(self, hashes: Sequence[bytes], last_copies: Sequence[bytes], blocks_cached: int) -> None:
        """`hashes` have left an instance, and with the `last_copies` among them the cluster, which holds
        `blocks_cached` blocks in all: about one turnover of them is remembered."""
        if not hashes:
            return
        kept = max(0.0, 1.0 - len(hashes) / EVICTIONS_WEIGHED)
        self._evicted = self._evicted * kept + len(hashes)
        self._missed *= kept
        ghosts = self._ghosts
        for block in last_copies:
            ghosts.pop(block, None)
            ghosts[block] = None
        limit = min(GHOSTS_MAX, max(blocks_cached, EVICTIONS_WEIGHED))
        while len(ghosts) > limit:
            del ghosts[next(iter(ghosts))]

    def note_wanted(self, hashes: Sequence[bytes], blocks_found: int) -> int:
        """A prompt has arrived, of which some instance holds `blocks_found` blocks; how many more it would have found
        but for evictions."""
        ghosts, missed = self._ghosts, 0
        if not ghosts:
            return 0
        for place in range(blocks_found, len(hashes)):
            if hashes[place] not in ghosts:
                break
            del ghosts[hashes[place]]
            missed += 1
        self._missed += missed
        return missed

    def share(self, blocks_cached: int) -> float:
        """Probability that a block evicted now is missed within one turnover."""
        span = min(1.0, GHOSTS_MAX / max(blocks_cached, 1))
        return min(1.0, self._missed / self._evicted / span)
