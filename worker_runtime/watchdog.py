"""Notices that an instance cannot go on: its engine hangs in a step, or pages of its pool will not come back.

Such an instance ends itself, and its slot gets a fresh process; its requests are planned again elsewhere. Time is
counted in looks of the I/O loop, not by the clock: a process that was stopped as a whole, or got no processor, has not
looked, and its engine is not to blame.
"""

from __future__ import annotations

from collections import deque

from segue.errors import SegueError
from segue.plan import BatchPlan, Chunk, PlanResult

LOOK_S = 1.0

STEP_LOOKS_MIN = 10
STEP_FACTOR = 10
"""A step hangs when it lasts ten times its prediction, and ten seconds at least."""

LOOKBACK_TOKENS = 2048
"""A token that attends to so many is taken for two. SmolLM2 on a CPU core: a chunk of 512 takes 4.5 s at the start of a
prompt and 17.5 s after 7,678 tokens; for larger models this is only more patient."""

FIRST_STEPS = 16
FIRST_STEP_LOOKS_MAX = 600
"""The first steps compile kernels and capture graphs."""

DRAIN_LOOKS_MAX = 30
"""What runs in an instance that is to be replaced gets so long to end by itself."""


class InstanceUnfit(SegueError):
    """This process cannot serve any more; the message says why."""


class EngineWatch:
    """`submitted` is called by the I/O loop, `finished` by the engine's thread, `look` once in LOOK_S.

    The prediction is the slowest pace seen so far, in time per token, for the tokens of the plan: far above what a long
    prefill chunk takes after short decode steps, and still seconds where a step hangs."""

    def __init__(self) -> None:
        self._open: deque[float] = deque()
        """Weighed tokens of each plan that is not finished, in order."""
        self._steps = 0
        self._pace_us = 0.0
        self._finished = 0
        self._finished_seen = 0
        self._looks = 0

    def submitted(self, plan: BatchPlan) -> None:
        self._open.append(sum(map(weighed_tokens, plan.chunks)) + len(plan.decodes) * plan.steps_max or 1)

    def finished(self, result: PlanResult) -> None:
        tokens = self._open.popleft()
        if self._steps >= FIRST_STEPS:
            self._pace_us = max(self._pace_us, result.elapsed_us / tokens)
        self._steps += result.steps
        self._finished += 1

    def look(self) -> str:
        """Why the engine is taken to hang, or ""."""
        if not self._open or self._finished != self._finished_seen:
            self._finished_seen, self._looks = self._finished, 0
            return ""
        self._looks += 1
        if self._looks < self._looks_max():
            return ""
        return f"the engine is in one step for {self._looks * LOOK_S:.0f} s"

    def _looks_max(self) -> float:
        if self._steps < FIRST_STEPS:
            return FIRST_STEP_LOOKS_MAX
        return max(STEP_LOOKS_MIN, STEP_FACTOR * self._pace_us * self._open[0] / 1e6 / LOOK_S)


def weighed_tokens(chunk: Chunk) -> float:
    """Tokens of a chunk in terms of those at the start of a prompt."""
    return chunk.length * (1 + chunk.start / LOOKBACK_TOKENS)


class ReplacementWait:
    """An instance that asked to be replaced ends when nothing runs any more, or after DRAIN_LOOKS_MAX."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, *, asked: bool, running: int) -> bool:
        """Whether to end now."""
        self._looks = self._looks + 1 if asked else 0
        return asked and (running == 0 or self._looks >= DRAIN_LOOKS_MAX)
