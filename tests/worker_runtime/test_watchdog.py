"""When an engine counts as hung, and when an instance that asked for it is replaced."""

from __future__ import annotations

from segue.plan import BatchPlan, Chunk, PlanResult
from worker_runtime.watchdog import (
    DRAIN_LOOKS_MAX,
    FIRST_STEP_LOOKS_MAX,
    FIRST_STEPS,
    LOOKBACK_TOKENS,
    STEP_LOOKS_MIN,
    EngineWatch,
    ReplacementWait,
)


def plan(op: int, tokens: int = 1) -> BatchPlan:
    return BatchPlan(op=op, chunks=[Chunk(row=0, start=0, length=tokens, sample=False)])


def warm_watch(elapsed_us: int = 1000) -> EngineWatch:
    watch = EngineWatch()
    for op in range(FIRST_STEPS + 1):
        watch.submitted(plan(op))
        watch.finished(PlanResult(op=op, steps=1, rows=[], elapsed_us=elapsed_us))
    assert watch.look() == ""
    return watch


def looks_until_hung(watch: EngineWatch) -> int:
    for looks in range(1, 10_000):
        if watch.look():
            return looks
    return 0


def test_step_that_does_not_end_is_noticed() -> None:
    watch = warm_watch()
    watch.submitted(plan(99))
    assert looks_until_hung(watch) == STEP_LOOKS_MIN


def test_idle_engine_never_hangs() -> None:
    assert looks_until_hung(warm_watch()) == 0


def test_engine_that_finishes_now_and_then_does_not_hang() -> None:
    watch = warm_watch()
    for op in range(100, 200):
        watch.submitted(plan(op))
        assert [watch.look() for _ in range(STEP_LOOKS_MIN - 1)] == [""] * (STEP_LOOKS_MIN - 1)
        watch.finished(PlanResult(op=op, steps=1, rows=[], elapsed_us=1000))
        assert watch.look() == ""


def test_large_plan_of_a_slow_engine_gets_ten_times_its_prediction() -> None:
    watch = warm_watch(elapsed_us=50_000)
    watch.submitted(plan(99, tokens=100))
    assert looks_until_hung(watch) == 50


def test_chunk_at_the_end_of_a_long_prompt_gets_longer() -> None:
    watch = warm_watch(elapsed_us=100_000)
    late = Chunk(row=0, start=3 * LOOKBACK_TOKENS, length=50, sample=False)
    watch.submitted(BatchPlan(op=99, chunks=[late]))
    assert looks_until_hung(watch) == 10 * 4 * 5


def test_first_steps_may_compile() -> None:
    watch = EngineWatch()
    watch.submitted(plan(1))
    assert looks_until_hung(watch) == FIRST_STEP_LOOKS_MAX


def test_compiling_is_no_measure_of_later_steps() -> None:
    watch = EngineWatch()
    for op in range(FIRST_STEPS):
        watch.submitted(plan(op))
        watch.finished(PlanResult(op=op, steps=1, rows=[], elapsed_us=60_000_000))
    watch.submitted(plan(99))
    assert watch.look() == ""
    assert looks_until_hung(watch) == STEP_LOOKS_MIN


def test_replacement_waits_for_what_runs_but_not_for_ever() -> None:
    wait = ReplacementWait()
    assert not wait.look(asked=False, running=0)
    assert not wait.look(asked=True, running=1)
    assert wait.look(asked=True, running=0)
    patience = ReplacementWait()
    assert [patience.look(asked=True, running=1) for _ in range(DRAIN_LOOKS_MAX)].index(True) == DRAIN_LOOKS_MAX - 1
