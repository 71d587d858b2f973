"""An engine without tensors: a plan takes as long as the cost model says, a sequence ends when its workload says so.

A multi-step plan is one event: it is advanced as far as the first sequence that ends, and cut short at the end of the
running step when something happens that the next plan must know. So 4 million decode steps become some ten thousand
plans, and a new sequence still waits for one step only.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

from segue.cost_model import CostModel
from segue.plan import BatchPlan, PlanResult, RowTokens
from simulator.prompt_tokens import EOS


class _Row:
    __slots__ = ("end", "known", "seed", "seq")

    def __init__(self, seq: int, known: int, end: int, seed: int) -> None:
        self.seq = seq
        self.known = known
        self.end = end
        """At this many tokens the sequence says EOS."""
        self.seed = seed

    def sample(self, steps: int) -> list[int]:
        """What it says is of no interest but for its end."""
        self.known += steps
        tokens = [self.seed % EOS] * steps
        if self.known >= self.end:
            tokens[-1] = EOS
        return tokens


class CostEngine:
    """`sampling.seed` of a sequence is its request's index; `tokens_output[index]` is how much it generates.

    `noise` is the relative standard deviation of a plan's time.
    """

    def __init__(self, cost: CostModel, tokens_output: Sequence[int], noise: float, seed: int) -> None:
        self._cost = cost
        self._tokens_output = tokens_output
        self._noise = noise
        self._random = random.Random(seed)
        self._rows: dict[int, _Row] = {}
        self._plan: BatchPlan | None = None
        self._started_us = 0
        self.step_ends_us: list[int] = []
        """When each step of the present, or last, plan ends."""
        self.tokens_computed = 0
        """By prefill chunks, all together."""

    @property
    def is_busy(self) -> bool:
        return self._plan is not None

    def launch(self, plan: BatchPlan, now_us: int) -> int:
        """Begin a plan; when it will be finished."""
        assert self._plan is None, "one plan at a time"
        self._plan, self._started_us = plan, now_us
        self._change_rows(plan)
        self.step_ends_us = self._plan_steps(plan, now_us)
        return self.step_ends_us[-1]

    def truncate(self, now_us: int) -> int | None:
        """End the plan with the step that runs now; the new time of its end, None when nothing changes."""
        steps = bisect_left(self.step_ends_us, now_us) + 1
        if self._plan is None or steps >= len(self.step_ends_us):
            return None
        del self.step_ends_us[steps:]
        return self.step_ends_us[-1]

    def collect(self) -> PlanResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "nothing was launched"
        steps = len(self.step_ends_us)
        rows = []
        for chunk in plan.chunks:
            self.tokens_computed += chunk.length
            if chunk.sample:
                row = self._rows[chunk.row]
                rows.append(RowTokens(chunk.row, row.seq, row.sample(1)))
        for number in plan.decodes:
            row = self._rows[number]
            rows.append(RowTokens(number, row.seq, row.sample(steps)))
        elapsed_us = self.step_ends_us[-1] - self._started_us
        return PlanResult(op=plan.op, steps=steps, rows=rows, elapsed_us=elapsed_us)

    def _change_rows(self, plan: BatchPlan) -> None:
        for row in plan.ends:
            del self._rows[row]
        for start in plan.starts:
            index = start.sampling.seed
            end = start.tokens_prompt + self._tokens_output[index]
            self._rows[start.row] = _Row(start.seq, len(start.tokens), end, index)

    def _plan_steps(self, plan: BatchPlan, now_us: int) -> list[int]:
        rows = [self._rows[number] for number in plan.decodes]
        kv_tokens = sum(row.known for row in rows)
        noise = max(0.1, self._random.gauss(1.0, self._noise)) if self._noise else 1.0
        if plan.chunks:
            chunks = [(chunk.length, chunk.start) for chunk in plan.chunks]
            return [now_us + max(1, round(noise * self._cost.step_us(chunks, len(rows), kv_tokens)))]
        steps = min(plan.steps_max, max(1, min(row.end - row.known for row in rows)))
        step_us = noise * self._cost.decode.us(len(rows), kv_tokens)
        growth_us = noise * self._cost.decode.kv_token_us * len(rows)
        # Step n of the plan takes step_us + n * growth_us, and at least a microsecond.
        linear_us, square_us = max(step_us - growth_us / 2, 1.0), growth_us / 2
        return [now_us + int(number * linear_us + number * number * square_us) for number in range(1, steps + 1)]

    def copy_page(self, source: object, source_page: int, own_page: int) -> None:
        """There is nothing in a page."""
