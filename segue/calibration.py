"""What predictions of one kind leave over: a correction, a bound that holds as often as it claims, a warning when not.

The median ratio of actual to predicted corrects a prediction; an upper quantile of the ratios bounds it (conformal
prediction, split, over a window that slides). Its level follows the misses, as in adaptive conformal inference (Gibbs
and Candes 2021), so that coverage returns after a change. Until it has returned the bounds are not to be trusted:
`drift` says so, and `quantile_us` turns careful by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from enum import StrEnum

RATIOS_KEPT = 512
"""Recent ratios of actual to predicted: a window of minutes at the rate of steps or requests."""

RATIOS_NEEDED = 20
"""Fewer ratios have no 90 % quantile worth the name."""

LEVEL_STEP = 0.05
"""How fast the level answers to misses: two in a row raise it to the largest ratio seen. Errors of a load forecast come
in runs; with a fifth of this, coverage of TPOT over 340 simulated requests was off by 4 points, so by 2."""

COVERAGE_SLACK = 0.05
COVERAGE_WINDOW = 200
"""Bounds at 90 % that hold in less than 85 % or more than 95 % of the last 200 cases: by chance one window in fifty."""

ALARM_WINDOW = 20
ALARM_SLACK = 0.2
"""Of the last 20 bounds, 70 % instead of 90 % held: by chance once in 400 windows, and ten times as soon."""

CAREFUL_FACTOR = 1.25
"""Widening of bounds that do not hold: as much again as a quarter of the prediction."""


class Drift(StrEnum):
    NONE = ""
    OPTIMISTIC = "optimistic"
    """Actual times exceed their bounds too often."""
    PESSIMISTIC = "pessimistic"
    """Bounds hold too often: something became faster, and load is turned away that would have fitted."""


class Calibration:
    """`quantile_us` holds in `aim` of the cases, whatever the distribution, as long as the recent past resembles the
    present; `coverage` says how often it did. Until there are enough observations the bound is `prior_ratio` times the
    prediction, and `is_ready` is false."""

    def __init__(self, aim: float = 0.9, prior_ratio: float = 1.5) -> None:
        if not 0.5 <= aim < 1.0 or prior_ratio < 1.0:
            raise ValueError(f"impossible aim {aim} or prior {prior_ratio}")
        self.aim = aim
        self._prior_ratio = prior_ratio
        self._level = aim
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._covered: deque[bool] = deque(maxlen=RATIOS_KEPT)
        self._hits = 0
        self._hits_recent = 0
        self._drift = Drift.NONE

    @property
    def is_ready(self) -> bool:
        return len(self._sorted) >= RATIOS_NEEDED

    def correct_us(self, predicted_us: float) -> float:
        """The middle of what to expect."""
        if not self.is_ready:
            return predicted_us
        return predicted_us * self._sorted[len(self._sorted) // 2]

    def quantile_us(self, predicted_us: float) -> float:
        """A bound that the actual time stays under in `aim` of the cases; wider while too few of them hold."""
        careful = CAREFUL_FACTOR if self._drift is Drift.OPTIMISTIC else 1.0
        return predicted_us * self._bound() * careful

    def observe(self, predicted_us: float, actual_us: float) -> None:
        """Learn from one finished prediction; `predicted_us` is as the model gave it, uncorrected."""
        if predicted_us <= 0.0:
            return
        ratio = actual_us / predicted_us
        if self.is_ready:
            self._score(ratio <= self._bound())
        self._recent.append(ratio)
        insort(self._sorted, ratio)
        if len(self._recent) > RATIOS_KEPT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    @property
    def coverage(self) -> float | None:
        """Share of recent actual times under their bound; None before the first bounded prediction ended. Widening does
        not count: this is about the quantile, which has to come back by itself."""
        return self._hits / len(self._covered) if self._covered else None

    @property
    def drift(self) -> Drift:
        """Whether the bounds hold less, or more, often than they claim."""
        return self._drift

    def _bound(self) -> float:
        count = len(self._sorted)
        if count < RATIOS_NEEDED:
            return self._prior_ratio
        return self._sorted[min(math.ceil(self._level * (count + 1)), count) - 1]

    def _score(self, covered: bool) -> None:
        if len(self._covered) == self._covered.maxlen:
            self._hits -= self._covered[0]
        if len(self._covered) >= COVERAGE_WINDOW:
            self._hits_recent -= self._covered[-COVERAGE_WINDOW]
        self._covered.append(covered)
        self._hits += covered
        self._hits_recent += covered
        moved = self._level + LEVEL_STEP * (self.aim - covered)
        self._level = min(max(moved, 0.5), 1.0)
        self._drift = self._judge()

    def _judge(self) -> Drift:
        seen = len(self._covered)
        if seen >= ALARM_WINDOW:
            held = sum(self._covered[-back] for back in range(1, ALARM_WINDOW + 1))
            if held < (self.aim - ALARM_SLACK) * ALARM_WINDOW:
                return Drift.OPTIMISTIC
        if seen >= COVERAGE_WINDOW:
            coverage = self._hits_recent / COVERAGE_WINDOW
            if coverage < self.aim - COVERAGE_SLACK:
                return Drift.OPTIMISTIC
            if coverage > self.aim + COVERAGE_SLACK:
                return Drift.PESSIMISTIC
        return Drift.NONE
