"""How many tokens a request will still generate: the prediction that admission books at the decode instance."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import Protocol

LENGTHS_KEPT = 512
"""Recent finished requests that the quantile is taken over."""

LENGTHS_NEEDED = 16
"""Fewer say nothing about the next."""

SPREAD_PARTS = 5
"""Enough to see that a tenth of the answers are very short."""

GROWTH_TOKENS_DEFAULT = 256
QUANTILE = 0.9


class GrowthPredictor(Protocol):
    def learn(self, tokens_generated: int) -> None: ...

    def predict(self, tokens_generated: int, tokens_left: int) -> int:
        """Tokens still to come, at most `tokens_left`, of a request that has `tokens_generated` already."""

    def expect(self, tokens_generated: int, tokens_left: int) -> int:
        """As `predict`, but what to expect instead of what to make room for."""

    def spread(self, tokens_generated: int, tokens_left: int) -> tuple[int, ...]:
        """Equally likely values of the same: the middles of SPREAD_PARTS parts of the distribution."""


class QuantileGrowth:
    """The 90 % quantile of recent output lengths among those that are longer than what is generated already."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def learn(self, tokens_generated: int) -> None:
        self._recent.append(tokens_generated)
        insort(self._sorted, tokens_generated)
        if len(self._recent) > LENGTHS_KEPT:
            self._sorted.pop(bisect_right(self._sorted, self._recent.popleft()) - 1)

    def predict(self, tokens_generated: int, tokens_left: int) -> int:
        longer = len(self._sorted) - (start := bisect_right(self._sorted, tokens_generated))
        if longer < LENGTHS_NEEDED:
            return min(GROWTH_TOKENS_DEFAULT, tokens_left)
        length = self._sorted[start + int(QUANTILE * (longer - 1))]
        return min(length - tokens_generated, tokens_left)

    def expect(self, tokens_generated: int, tokens_left: int) -> int:
        longer = self._sorted[bisect_right(self._sorted, tokens_generated) :]
        if len(longer) < LENGTHS_NEEDED:
            return min(GROWTH_TOKENS_DEFAULT, tokens_left)
        return min(sum(longer) // len(longer) - tokens_generated, tokens_left)

    def spread(self, tokens_generated: int, tokens_left: int) -> tuple[int, ...]:
        start = bisect_right(self._sorted, tokens_generated)
        longer = len(self._sorted) - start
        if longer < LENGTHS_NEEDED:
            return (max(1, min(GROWTH_TOKENS_DEFAULT, tokens_left)),)
        middles = [start + (2 * part + 1) * longer // (2 * SPREAD_PARTS) for part in range(SPREAD_PARTS)]
        return tuple(max(1, min(self._sorted[middle] - tokens_generated, tokens_left)) for middle in middles)
