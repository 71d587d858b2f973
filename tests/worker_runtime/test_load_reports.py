"""What makes a load report due before its time."""

from __future__ import annotations

import asyncio

import pytest

from segue.block_pool import BlockPool
from segue.ids import InstanceRef
from segue.kv_events import LoadReport
from worker_runtime import load_reports
from worker_runtime.events import CoreLoad
from worker_runtime.load_reports import LoadReporter

REF = InstanceRef("d", 1)


class IdleCore:
    """A core without a request: what it holds is still on its way back."""

    def load(self) -> CoreLoad:
        return CoreLoad(running=0, waiting=0, tokens_queued=0, tokens_running=0, preemptions=0, draining=False)


class KeptReports:
    """An `EventPublisher` as far as a reporter knows it."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[LoadReport] = asyncio.Queue()
        self.next_sequence = 1

    def publish_load(self, report: LoadReport) -> None:
        self.next_sequence += 1
        self.reports.put_nowait(report)


async def test_last_page_that_comes_back_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reports, "INTERVAL_S", 1e6)
    monkeypatch.setattr(load_reports, "LOOK_S", 0.001)
    pool, publisher = BlockPool(1000, 4), KeptReports()
    pages = pool.allocate(3)
    pool.hold(pages)
    reporter = LoadReporter(REF, IdleCore(), pool, publisher)  # type: ignore[arg-type]
    task = asyncio.create_task(reporter.run())
    assert (await asyncio.wait_for(publisher.reports.get(), 30)).pages_held == 3
    pool.unhold(pages)
    pool.release(pages)
    last = await asyncio.wait_for(publisher.reports.get(), 30)
    assert (last.pages_held, last.pages_free) == (0, 1000)
    task.cancel()
