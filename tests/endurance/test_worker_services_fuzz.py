"""Broken and hostile instances at the services that only instances should call: `Attach` and `Push`.

Whatever a stream says, it ends alone: the front lives, the streams of the real instances and of clients go on, and the
log knows of no bug.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import grpc
import pytest
from test_endurance_fuzz import check_sound
from toy_cluster import InferenceStub, Stream, ToyCluster, channel, follow, request_of, view
from worker_bytes import stream_bytes, stream_metadata

from worker_runtime.toy_engine import toy_tokens

STREAMS = int(os.environ.get("SEGUE_WORKER_FUZZ_STREAMS", "5000"))
"""Of the long run."""

METHODS = {"Attach": "/segue.v1.WorkerControl/Attach", "Push": "/segue.v1.TokenLink/Push"}
ANSWERED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}
"""INTERNAL and UNKNOWN would be our bug."""

WRITE_TOO_LATE = "Internal error from Core"
"""Of our own end of the call, which hides the status: it was writing when the front ended the stream."""

READ_S_MAX = 0.1
"""A stream that was not refused stays open: it is left after so long."""

STREAMS_AT_ONCE = 8


async def send_stream(connection: grpc.aio.Channel, method: str, rng: random.Random) -> str:
    """How the front ended the stream, or LEFT when it did not."""
    call = connection.stream_stream(METHODS[method])(metadata=stream_metadata(method, rng))
    try:
        for message in stream_bytes(method, rng):
            await call.write(message)
        await call.done_writing()
        async with asyncio.timeout(READ_S_MAX):
            async for _ in call:
                pass
    except TimeoutError:
        return "LEFT"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
    status = await call.code()
    if await call.details() == WRITE_TOO_LATE:
        return "ENDED"
    assert status in ANSWERED, f"{method}: {status} {await call.details()}"
    return str(status.name)


async def send_streams(address: str, count: int, seed: int) -> Counter[str]:
    endings: Counter[str] = Counter()
    left = iter(range(count))

    async def one_after_another(connection: grpc.aio.Channel) -> None:
        for number in left:
            method = "Push" if number % 2 else "Attach"
            ending = await send_stream(connection, method, random.Random(seed * 1_000_003 + number))
            endings[f"{method} {ending}"] += 1

    async with channel(address) as connection:
        await asyncio.gather(*(one_after_another(connection) for _ in range(STREAMS_AT_ONCE)))
    return endings


async def until_strangers_are_gone(cluster: ToyCluster) -> None:
    async with channel(cluster.grpc) as connection, asyncio.timeout(20):
        while {one.name for one in (await view(InferenceStub(connection))).instances} != cluster.pids().keys():
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "count", [400, pytest.param(STREAMS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="long")]
)
async def test_hostile_instances_disturb_nobody(cluster: ToyCluster, count: int) -> None:
    pids, stream = cluster.pids(), Stream()
    async with channel(cluster.grpc) as connection:
        request = request_of([9] * 20, 2000, seed=5)
        client = asyncio.create_task(follow(InferenceStub(connection), request, stream, timeout_s=600.0))
        endings = await send_streams(cluster.grpc, count, seed=count)
        await client
    assert stream.tokens == toy_tokens([9] * 20, 2000, seed=5)
    assert stream.finished is not None and stream.finished.attempts == 1
    assert endings["Attach LEFT"] + endings["Attach OK"] > count // 40, "hardly any stream was read to its end"
    assert endings["Push INVALID_ARGUMENT"] > 0 and endings["Push FAILED_PRECONDITION"] > 0
    await until_strangers_are_gone(cluster)
    await check_sound(cluster, pids, cluster.front_log)
