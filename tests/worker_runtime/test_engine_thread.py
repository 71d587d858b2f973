"""The engine's thread: results in launch order, launches ahead of collects, one failure and then nothing."""

from __future__ import annotations

import queue

from segue.plan import BatchPlan, PlanResult
from worker_runtime.engine_thread import EngineThread
from worker_runtime.toy_engine import ToyEngine


class LoggingEngine(ToyEngine):
    """Notes the order of calls; fails when asked for plan `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__(4, 4)
        self.calls: list[str] = []
        self._fails_at = fails_at

    def launch(self, plan: BatchPlan) -> None:
        self.calls.append(f"launch {plan.op}")
        super().launch(plan)

    def collect(self) -> PlanResult:
        result = super().collect()
        if result.op == self._fails_at:
            raise RuntimeError("device lost")
        self.calls.append(f"collect {result.op}")
        return result


def test_second_plan_is_launched_before_the_first_is_collected() -> None:
    engine, results = LoggingEngine(), queue.SimpleQueue[PlanResult]()
    thread = EngineThread(engine, results.put, lambda error: None)
    for op in (1, 2, 3):
        thread.submit(BatchPlan(op=op))
    thread.start()
    assert [results.get(timeout=30).op for _ in range(3)] == [1, 2, 3]
    thread.stop()
    assert engine.calls[:2] == ["launch 1", "launch 2"]
    assert thread.steps == 3


def test_stop_finishes_what_was_submitted() -> None:
    engine, results = LoggingEngine(), queue.SimpleQueue[PlanResult]()
    thread = EngineThread(engine, results.put, lambda error: None)
    thread.start()
    for op in (1, 2):
        thread.submit(BatchPlan(op=op))
    thread.stop()
    assert [results.get_nowait().op for _ in range(2)] == [1, 2]


def test_failure_is_told_once_and_nothing_is_executed_after_it() -> None:
    engine, failures = LoggingEngine(fails_at=1), queue.SimpleQueue[BaseException]()
    thread = EngineThread(engine, lambda result: None, failures.put)
    thread.submit(BatchPlan(op=1))
    thread.start()
    assert str(failures.get(timeout=30)) == "device lost"
    thread.submit(BatchPlan(op=2))
    thread.stop()
    assert engine.calls == ["launch 1"]
    assert failures.empty()
