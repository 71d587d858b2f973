"""The toy engine in virtual time: its tokens are right only if every page held the right K/V at every step."""

from __future__ import annotations

import random

from segue.plan import BatchPlan, PlanResult
from simulator.parts import SimEngine
from worker_runtime.toy_engine import ToyEngine


class ToyClockEngine:
    """Plans take a random time. `slowdown` multiplies it."""

    def __init__(self, pages_total: int, block_size: int, source: random.Random, step_us_max: int = 4_000) -> None:
        self.toy = ToyEngine(pages_total, block_size)
        self.slowdown = 1
        self.step_ends_us: list[int] = []
        self._random = source
        self._step_us_max = step_us_max
        self._started_us: int | None = None

    @property
    def is_busy(self) -> bool:
        return self._started_us is not None

    def launch(self, plan: BatchPlan, now_us: int) -> int:
        assert self._started_us is None, "one plan at a time"
        self.toy.launch(plan)
        self._started_us = now_us
        step_us = 1 + self._random.randrange(self._step_us_max) * self.slowdown
        self.step_ends_us = [now_us + step_us * number for number in range(1, plan.steps_max + 1)]
        return self.step_ends_us[-1]

    def truncate(self, now_us: int) -> int | None:
        return None

    def collect(self) -> PlanResult:
        self._started_us = None
        return self.toy.collect()

    def copy_page(self, source: SimEngine, source_page: int, own_page: int) -> None:
        assert isinstance(source, ToyClockEngine), "engines of one cluster are of one kind"
        size = self.toy.layout.page_bytes
        data = source.toy.buffer[source_page * size : (source_page + 1) * size]
        self.toy.buffer[own_page * size : (own_page + 1) * size] = data
