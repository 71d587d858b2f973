"""How fast requests get placed: what a rejection tells the client about when to come back."""

from __future__ import annotations

RETRY_AFTER_MS_MIN = 100
RETRY_AFTER_MS_MAX = 30_000
RETRY_AFTER_MS_DEFAULT = 1_000
"""When nothing was placed yet."""

INTERVAL_WEIGHT = 0.05


class PlacementRate:
    """Exponential mean of the interval between two placements."""

    def __init__(self) -> None:
        self._last_us: int | None = None
        self._interval_us: float | None = None

    def placed(self, now_us: int) -> None:
        if self._last_us is not None:
            interval = now_us - self._last_us
            mean = interval if self._interval_us is None else self._interval_us
            self._interval_us = mean + INTERVAL_WEIGHT * (interval - mean)
        self._last_us = now_us

    def retry_after_ms(self, requests_ahead: int) -> int:
        if self._interval_us is None:
            return RETRY_AFTER_MS_DEFAULT
        wait_ms = int(requests_ahead * self._interval_us / 1000)
        return max(RETRY_AFTER_MS_MIN, min(wait_ms, RETRY_AFTER_MS_MAX))
