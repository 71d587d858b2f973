"""Drives a workload against a server: closed loop (so many at once) or open loop (at given times).

Warm-up requests run first, at the same concurrency, to their end, and are not counted. The run ends after so many
requests or seconds; requests under way then get a grace time, and what is still open after it is an error, not silence.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from bench_client.exchange import Clock
from bench_client.records import Exchange, PlannedRequest

OPEN_REQUESTS_MAX = 8192
"""An overloaded server must not fill the client; arrivals beyond this are errors of the client."""

LAG_PROBE_S = 0.01

Send = Callable[[PlannedRequest, int | None], Awaitable[Exchange]]
"""Planned request and the time it was due (None: when a slot is free)."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """When to stop. At least one of `requests` and `seconds` is given unless the workload ends by itself."""

    requests: int | None = None
    seconds: float | None = None
    grace_s: float = 30.0


class LoadRun:
    """`on_sent` and `on_done` are told of every counted request, for whoever shows progress."""

    def __init__(
        self, send: Send, clock: Clock, extent: Extent, on_sent: Callable[[], None], on_done: Callable[[Exchange], None]
    ) -> None:
        self._send = send
        self._clock = clock
        self._extent = extent
        self._on_sent = on_sent
        self._on_done = on_done
        self._open: dict[asyncio.Task[None], tuple[PlannedRequest, int, int | None]] = {}
        self.exchanges: list[Exchange] = []
        self.lags_us: list[int] = []
        """How late the client's own event loop woke up: what it adds to every stamp."""

    async def closed_loop(self, planned: Iterator[PlannedRequest], concurrency: int) -> None:
        """Keep `concurrency` requests open. A cancel stops sending and returns what was seen."""
        due = self._within_extent(planned)
        async with _Probe(self.lags_us):
            await self._until_end(self._keep_open(due, concurrency))

    async def open_loop(self, planned: Iterator[PlannedRequest]) -> None:
        """Send each request at its `arrival_us`, whatever the server does."""
        async with _Probe(self.lags_us):
            await self._until_end(self._on_time(self._within_extent(planned), self._clock.now_us()))

    def _within_extent(self, planned: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
        return itertools.islice(planned, self._extent.requests)

    async def _until_end(self, sending: Awaitable[None]) -> None:
        try:
            await self._within_time(sending)
            if self._open:
                await asyncio.wait([*self._open], timeout=self._extent.grace_s)
        finally:
            await self._give_up()

    async def _within_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._extent.seconds):
                await sending
        except TimeoutError:
            pass  # the time of the run is over; what is open has its grace

    async def _keep_open(self, due: Iterator[PlannedRequest], concurrency: int) -> None:
        for planned in due:
            if len(self._open) >= concurrency:
                await asyncio.wait([*self._open], return_when=asyncio.FIRST_COMPLETED)
            self._start(planned, None)
        if self._open:
            await asyncio.wait([*self._open])

    async def _on_time(self, due: Iterator[PlannedRequest], start_us: int) -> None:
        for planned in due:
            assert planned.arrival_us is not None, "an open loop needs arrival times"
            due_us = start_us + planned.arrival_us
            await asyncio.sleep(max(due_us - self._clock.now_us(), 0) / 1e6)
            if len(self._open) < OPEN_REQUESTS_MAX:
                self._start(planned, due_us)
            else:
                self._record(_unsent(planned, due_us, self._clock.now_us()))
        if self._open:
            await asyncio.wait([*self._open])

    def _start(self, planned: PlannedRequest, due_us: int | None) -> None:
        task = asyncio.create_task(self._one(planned, due_us))
        self._open[task] = (planned, self._clock.now_us(), due_us)
        task.add_done_callback(self._open.pop)
        self._on_sent()

    async def _one(self, planned: PlannedRequest, due_us: int | None) -> None:
        self._record(await self._send(planned, due_us))

    async def _give_up(self) -> None:
        """Also after Ctrl-C: the server sees closed connections and frees what they held."""
        left = dict(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for planned, sent_us, due_us in left.values():
            self._record(_unfinished(planned, sent_us, due_us, self._clock.now_us()))

    def _record(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        self._on_done(exchange)


async def warm_up(send: Send, planned: Iterator[PlannedRequest], requests: int, concurrency: int) -> list[Exchange]:
    """The answers, so that the caller can see whether the server answers at all."""
    slots = asyncio.Semaphore(concurrency)

    async def one(request: PlannedRequest) -> Exchange:
        async with slots:
            return await send(request, None)

    return list(await asyncio.gather(*(one(request) for request in itertools.islice(planned, requests))))


class _Probe:
    """Measures, while entered, how late the event loop wakes up."""

    def __init__(self, lags_us: list[int]) -> None:
        self._lags_us = lags_us

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._measure())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _measure(self) -> None:
        clock = Clock()
        while True:
            begin_us = clock.now_us()
            await asyncio.sleep(LAG_PROBE_S)
            self._lags_us.append(max(clock.now_us() - begin_us - round(LAG_PROBE_S * 1e6), 0))


def _unsent(planned: PlannedRequest, due_us: int, now_us: int) -> Exchange:
    detail = f"{OPEN_REQUESTS_MAX} requests are open"
    return _failed(planned, due_us, now_us, now_us, "client full", detail)


def _unfinished(planned: PlannedRequest, sent_us: int, due_us: int | None, now_us: int) -> Exchange:
    return _failed(planned, due_us, sent_us, now_us, "unfinished", "still open when the run ended")


def _failed(
    planned: PlannedRequest, due_us: int | None, sent_us: int, ended_us: int, kind: str, detail: str
) -> Exchange:
    return Exchange(
        index=planned.index,
        tokens_input_planned=planned.tokens_input,
        tokens_output_planned=planned.tokens_output,
        scheduled_us=due_us,
        sent_us=sent_us,
        ended_us=ended_us,
        error=kind,
        detail=detail,
    )
