"""A bidirectional stream whose messages come from one generator that ends with it.

grpc.aio reads a generator it is given until the generator ends, also when the call has broken meanwhile: the next
message is then taken from the state that the generators of two calls share, and is lost with the dead one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc


async def converse(method: Callable[[], Any], messages: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """What the peer says, while it is sent `messages`. The stream ends when the peer ends it.

    Raises:
        grpc.aio.AioRpcError: the stream has broken.
    """
    call = method()
    writer = asyncio.create_task(_write(call, messages))
    try:
        async for answer in call:
            yield answer
    finally:
        call.cancel()
        writer.cancel()
        (failure,) = await asyncio.gather(writer, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure


async def _write(call: Any, messages: AsyncGenerator[Any, None]) -> None:
    try:
        async with aclosing(messages):
            async for message in messages:
                await call.write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the call has ended: whoever reads it is told why
    except Exception:
        call.cancel()
        raise
