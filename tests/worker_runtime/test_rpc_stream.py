"""A stream ends the generator of its messages, however it ends itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from front_rig import Front
from segue_proto.v1 import worker_pb2, worker_pb2_grpc

from segue.wire_version import METADATA_KEY, WIRE_VERSION
from worker_runtime.rpc_stream import converse


class Messages:
    """A generator that waits for ever after its first message; `ended` once it has been closed."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.ended = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            yield worker_pb2.TokenBatch()
            if self.failure is not None:
                raise self.failure
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def listen(front: Front, messages: Messages, *, answers: int | None = None) -> None:
    """Until so many answers have come, or the stream ends."""
    async with grpc.aio.insecure_channel(front.address) as channel:
        push = worker_pb2_grpc.TokenLinkStub(channel).Push

        def method() -> Any:
            return push(metadata=((METADATA_KEY, str(WIRE_VERSION)),))

        async with aclosing(converse(method, messages())) as stream:
            count = 0
            async for _ in stream:
                count += 1
                if count == answers:
                    return


async def test_messages_end_with_a_stream_that_breaks() -> None:
    front, messages = Front(), Messages()
    front.cut_tokens_after = 1
    await front.start()
    with pytest.raises(grpc.aio.AioRpcError, match="cut by the test"):
        await listen(front, messages)
    assert messages.ended.is_set()
    await front.close()


async def test_messages_end_with_who_listens() -> None:
    front, messages = Front(), Messages()
    await front.start()
    await listen(front, messages, answers=1)
    assert messages.ended.is_set()
    await front.close()


async def test_failure_of_the_messages_is_that_of_the_stream() -> None:
    front, messages = Front(), Messages(ValueError("a bug"))
    await front.start()
    with pytest.raises(ValueError, match="a bug"):
        await listen(front, messages)
    await front.close()
