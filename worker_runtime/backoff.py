"""Waits between attempts to reconnect: doubled each time, with jitter, so that workers do not return in step."""

from __future__ import annotations

import random


class Backoff:
    """`next_s()` gives 50-100 % of a doubling delay; `reset` after success."""

    def __init__(self, first_s: float = 0.05, max_s: float = 2.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._delay_s = first_s
        self._random = random.Random()

    def next_s(self) -> float:
        delay_s = self._delay_s * self._random.uniform(0.5, 1.0)
        self._delay_s = min(self._delay_s * 2, self._max_s)
        return delay_s

    def reset(self) -> None:
        self._delay_s = self._first_s
