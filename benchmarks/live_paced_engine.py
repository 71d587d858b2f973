"""The toy engine at the pace of a cost model: each plan lasts as long as the model says, from when the engine could
begin it.

Its tokens stay right only if every page held the right K/V, so a paced cluster does all the work of a real one but the
arithmetic; and because its costs are known exactly, what a simulation of it gets wrong is not the cost of a step.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from functools import cache

from msgspec.structs import replace

from segue.cost_model import CostModel
from segue.plan import BatchPlan, PlanResult
from worker_runtime.toy_engine import VOCAB_SIZE, ToyEngine


@cache
def word_tokenizer() -> str:
    """A `tokenizer.json` with one word per token, so that a gateway can serve the model."""
    vocab = {f"t{number} ": number for number in range(VOCAB_SIZE)}
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0 "}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}, **absent})


class PacedEngine:
    """Implements `EnginePort`. Plans queue: one begins when it is launched or when the one before has ended."""

    def __init__(
        self,
        engine: ToyEngine,
        cost: CostModel,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._clock_s = clock_s
        self._sleep = sleep
        self._launched: deque[tuple[BatchPlan, float]] = deque()
        self._known: dict[int, int] = {}
        """Tokens of each row."""
        self._free_s = 0.0
        self.busy_s = 0.0
        """What plans should have taken, all together."""
        self.late_s = 0.0
        """By how much they took longer: the machine was too slow for the pace."""
        self.card = replace(engine.card, tokenizer_json=word_tokenizer(), digest="paced-toy")
        self.layout = engine.layout
        self.kv_root = engine.kv_root
        self.pages_total = engine.pages_total
        self.numerics = ""

    def launch(self, plan: BatchPlan) -> None:
        self._launched.append((plan, self._clock_s()))
        self._engine.launch(plan)

    def collect(self) -> PlanResult:
        plan, launched_s = self._launched.popleft()
        begin_s = max(launched_s, self._free_s)
        end_s = begin_s + self._plan_s(plan)
        result = self._engine.collect()
        for row in result.rows:
            self._known[row.row] += len(row.tokens)
        left_s = end_s - self._clock_s()
        if left_s > 0:
            self._sleep(left_s)
        self._free_s = self._clock_s()
        self.busy_s += end_s - begin_s
        self.late_s += max(0.0, self._free_s - end_s)
        return replace(result, elapsed_us=round((self._free_s - begin_s) * 1e6))

    def close(self) -> None:
        self._engine.close()

    def _plan_s(self, plan: BatchPlan) -> float:
        for row in plan.ends:
            del self._known[row]
        for start in plan.starts:
            self._known[start.row] = len(start.tokens)
        chunks = [(chunk.length, chunk.start) for chunk in plan.chunks]
        kv_tokens = sum(self._known[row] for row in plan.decodes)
        rows = len(plan.decodes)
        return sum(self._cost.step_us(chunks, rows, kv_tokens + step * rows) for step in range(plan.steps_max)) / 1e6
