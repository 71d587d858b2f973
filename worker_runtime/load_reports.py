"""Load reports: what an instance says about itself every second, and at once when it changes much."""

from __future__ import annotations

import asyncio

from kvstore.events_zmq import EventPublisher
from segue.block_pool import BlockPool
from segue.ids import InstanceRef
from segue.kv_events import LoadReport
from worker_runtime.events import WorkerCore

INTERVAL_S = 1.0
LOOK_S = 0.1
CHANGE_PERCENT = 10
"""Of the pool's pages, or any change from or to idle: the last page that comes back is news, it may be waited for."""

STEP_MEAN_WEIGHT = 0.1


class LoadReporter:
    def __init__(self, ref: InstanceRef, core: WorkerCore, pool: BlockPool, publisher: EventPublisher) -> None:
        self._ref = ref
        self._core = core
        self._pool = pool
        self._publisher = publisher
        self._step_us = 0.0
        self._last: LoadReport | None = None

    def note_step(self, elapsed_us: int, steps: int) -> None:
        """Feeds the exponential mean of step times."""
        step_us = elapsed_us / max(steps, 1)
        weight = 1.0 - (1.0 - STEP_MEAN_WEIGHT) ** max(steps, 1) if self._step_us else 1.0
        self._step_us += (step_us - self._step_us) * weight

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            report = self._report()
            if loop.time() >= due or self._changed_much(report):
                self._publisher.publish_load(report)
                self._last = report
                due = loop.time() + INTERVAL_S
            await asyncio.sleep(LOOK_S)

    def _changed_much(self, report: LoadReport) -> bool:
        last = self._last
        if last is None:
            return True
        busy, was_busy = _is_busy(report), _is_busy(last)
        moved = abs(report.pages_active + report.pages_held - last.pages_active - last.pages_held)
        return busy != was_busy or report.draining != last.draining or moved * 100 > report.pages_total * CHANGE_PERCENT

    def _report(self) -> LoadReport:
        load, counts = self._core.load(), self._pool.counts()
        return LoadReport(
            ref=self._ref,
            sequence=self._publisher.next_sequence,
            running=load.running,
            waiting=load.waiting,
            tokens_queued=load.tokens_queued,
            tokens_running=load.tokens_running,
            pages_free=counts.free,
            pages_active=counts.active,
            pages_cached=counts.cached,
            pages_held=counts.held,
            pages_quarantined=counts.quarantined,
            pages_total=counts.total,
            step_us=int(self._step_us),
            preemptions=load.preemptions,
            draining=load.draining,
        )


def _is_busy(report: LoadReport) -> bool:
    return report.running + report.waiting + report.pages_active + report.pages_held + report.pages_quarantined > 0
