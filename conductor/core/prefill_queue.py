"""Prompts booked on one instance and not computed yet, in predicted time; how fast the instance really is.

First come, first served, one at a time: the time of the present prompt counts from when the one before it was done, or
from when it began. What an instance takes for a prompt against its prediction is its `slowness`: contention, throttling
or a model of another kind show there within some prompts.
"""

from __future__ import annotations

from segue.ids import AttemptRef

LEARNED_US = 2_000_000.0
"""Predicted time after which an older observation counts a third: a long prompt says more than a short one."""

SLOWNESS_MIN, SLOWNESS_MAX = 1 / 64, 64.0
"""A prior may be far off; a clock that stood still must not look like infinite speed."""


OVERDUE_SHARE = 0.25
"""What is late gets later: of a prompt that runs longer than predicted, so much of its time so far is still to come. An
instance that hangs does not look idle."""


class PrefillQueue:
    def __init__(self) -> None:
        self.slowness = 1.0
        self._waiting: dict[AttemptRef, float] = {}
        self._total_us = 0.0
        self._since_us = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: AttemptRef, predicted_us: float, now_us: int) -> None:
        """`predicted_us` as the cost model gave it: slowness is applied when it is read."""
        if not self._waiting:
            self._since_us = now_us
        self._waiting[key] = predicted_us
        self._total_us += predicted_us

    def begin(self, key: AttemptRef, now_us: int) -> None:
        """It is being computed. Waiting for pages before that was no work."""
        if key == next(iter(self._waiting), None):
            self._since_us = max(self._since_us, now_us)

    def done(self, key: AttemptRef, now_us: int) -> None:
        """It is computed. No change when it is not waited for (any more)."""
        predicted_us = self.drop(key)
        if predicted_us is None:
            return
        taken_us = now_us - self._since_us
        self._since_us = now_us
        weight = predicted_us / (predicted_us + LEARNED_US)
        ratio = min(max(taken_us / predicted_us, SLOWNESS_MIN), SLOWNESS_MAX)
        self.slowness += weight * (ratio - self.slowness)

    def drop(self, key: AttemptRef) -> float | None:
        """It is not waited for any more; what was predicted."""
        predicted_us = self._waiting.pop(key, None)
        if predicted_us is not None:
            self._total_us = self._total_us - predicted_us if self._waiting else 0.0
        return predicted_us

    def remaining_us(self, now_us: int) -> float:
        """Until everything that is booked now is computed."""
        if not self._waiting:
            return 0.0
        first_us = next(iter(self._waiting.values()))
        elapsed_us = now_us - self._since_us
        rest_us = max(first_us * self.slowness - elapsed_us, OVERDUE_SHARE * elapsed_us)
        return (self._total_us - first_us) * self.slowness + rest_us
