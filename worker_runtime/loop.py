"""The I/O loop of a worker: gather what has happened, ask the core once, carry out what it decided."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from worker_runtime.events import Event, WorkerCore
from worker_runtime.recording import Recorder


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class WorkerLoop:
    """`effects` maps each kind of decision to what carries it out; an effect may post events, never call the core.

    Everything that arrives while the loop was busy becomes one batch of events, so that the cost of a step is shared.
    """

    def __init__(
        self, core: WorkerCore, effects: Mapping[type, Callable[[Any], None]], recorder: Recorder | None = None
    ) -> None:
        self._core = core
        self._effects = effects
        self._recorder = recorder
        self._inbox: list[Event] = []
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None

    def post(self, event: Event) -> None:
        """From the loop's own thread."""
        self._inbox.append(event)
        self._wake.set()

    def post_threadsafe(self, event: Event) -> None:
        """From any thread; ignored once the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def fail_threadsafe(self, error: BaseException) -> None:
        """End `run` with this error: the worker cannot go on."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._wake.set()

    async def run(self, stopped: asyncio.Event) -> None:
        """Until `stopped`; raises what was given to `fail_threadsafe`."""
        stop_watch = asyncio.create_task(self._wake_when(stopped))
        try:
            while not stopped.is_set():
                if self._failure is not None:
                    raise self._failure
                self.step()
                await self._sleep()
        finally:
            stop_watch.cancel()

    def step(self) -> None:
        """One batch of events, one call of the core. Effects that post events are heard in the next step."""
        self._wake.clear()
        events, self._inbox = self._inbox, []
        now_us = monotonic_us()
        decisions = self._core.step(now_us, events)
        if self._recorder is not None:
            self._recorder.write(now_us, events, decisions)
        for decision in decisions:
            self._effects[type(decision)](decision)

    async def _sleep(self) -> None:
        """Until something arrives or the core wants to be woken. Yields even when there is work: sockets come first."""
        await asyncio.sleep(0)
        wakeup_us = self._core.next_wakeup()
        if self._wake.is_set():
            return
        if wakeup_us is None:
            await self._wake.wait()
            return
        timer = self._loop.call_later(max(0, wakeup_us - monotonic_us()) / 1e6, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    async def _wake_when(self, stopped: asyncio.Event) -> None:
        await stopped.wait()
        self._wake.set()
