"""A streamed HTTP answer that notices a client's departure at once and always runs its clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from segue.errors import Cancelled

T = TypeVar("T")


async def client_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection (the request's body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first; then raises Cancelled."""
    gone = asyncio.ensure_future(client_gone(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client is gone")
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: `first`, then the others. `on_end` runs exactly once, whatever ends the stream."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, parts: AsyncIterator[bytes], on_end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._parts = parts
        self._on_end = on_end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except Cancelled:
            pass  # nobody is left to be told
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
