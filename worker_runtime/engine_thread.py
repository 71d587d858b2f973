"""One thread that executes batch plans, so that a cancel or a heartbeat never waits for a step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from segue.plan import BatchPlan, PlanResult
from worker_runtime.engine_port import EnginePort
from worker_runtime.watchdog import EngineWatch

STOP_S_MAX = 5.0
"""As the launcher waits ten seconds before it kills, and others must close after the engine."""


class EngineThread:
    """Launches plans as they come and collects results in launch order.

    With pipeline depth 1 the core submits a second plan while the first runs; it is launched before the first is
    collected, so that the device never waits for the host. `on_result` and `on_failure` are called in this thread.
    After a failure nothing more is executed: the state of the device is unknown.
    """

    def __init__(
        self,
        engine: EnginePort,
        on_result: Callable[[PlanResult], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_result = on_result
        self._on_failure = on_failure
        self._plans: queue.SimpleQueue[BatchPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.watch = EngineWatch()
        self.steps = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: BatchPlan) -> None:
        self.watch.submitted(plan)
        self._plans.put(plan)

    def stop(self) -> None:
        """Finish what was submitted, then end. An engine that hangs is left behind: the process ends without it."""
        self._plans.put(None)
        self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        try:
            self._execute()
        except Exception as error:
            self._on_failure(error)

    def _execute(self) -> None:
        launched, stopping = 0, False
        while not stopping or launched:
            plan = None
            if not stopping and (launched == 0 or not self._plans.empty()):
                plan = self._plans.get()
                stopping = plan is None
            if plan is not None:
                self._engine.launch(plan)
                launched += 1
            elif launched:
                result = self._engine.collect()
                launched -= 1
                self.watch.finished(result)
                self.steps += result.steps
                self._on_result(result)
