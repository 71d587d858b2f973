"""SIGTERM, as Kubernetes sends it: an instance ends what it runs and leaves; what takes too long goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from kill_storm import until
from segue_proto.v1 import inference_pb2
from toy_cluster import InferenceStub, Stream, ToyCluster, channel, follow, request_of, toy_cluster, view

from worker_runtime.toy_engine import toy_tokens

PROMPT = list(range(50))


async def streaming(stub: Any, tokens_max: int) -> tuple[asyncio.Task[Stream], inference_pb2.Instance]:
    """One stream under way, and the decode instance that runs it."""
    stream = Stream()
    client = asyncio.create_task(follow(stub, request_of(PROMPT, tokens_max, seed=3), stream))
    await until(lambda: len(stream.tokens) if len(stream.tokens) > 10 else None)
    async with asyncio.timeout(30):
        while not (busy := [one for one in (await view(stub)).instances if one.running and one.role == "decode"]):
            await asyncio.sleep(0.02)
    return client, busy[0]


async def shown_as(stub: Any, name: str, state: str) -> None:
    async with asyncio.timeout(30):
        while state not in [one.state for one in (await view(stub)).instances if one.name == name]:
            await asyncio.sleep(0.02)


def has_left(cluster: ToyCluster, pid: int) -> Any:
    return until(lambda: 1 if pid not in cluster.pids().values() else None)


async def test_draining_instance_ends_its_stream_and_gets_no_new_one(tmp_path: Path) -> None:
    with toy_cluster(tmp_path, decode=2, step_ms=5.0) as cluster:
        async with channel(cluster.grpc) as connection:
            stub = InferenceStub(connection)
            client, busy = await streaming(stub, 400)
            os.kill(busy.pid, signal.SIGTERM)
            await shown_as(stub, busy.name, "draining")
            for _ in range(4):
                other = await follow(stub, request_of(PROMPT[::-1], 5), Stream())
                assert other.finished is not None
                assert other.finished.decode_instance != busy.name
                assert other.finished.attempts == 1
            assert not client.done(), "the stream was too short to show anything"
            stream = await client
            await has_left(cluster, busy.pid)
    assert stream.tokens == toy_tokens(PROMPT, 400, seed=3)
    assert stream.finished is not None
    assert (stream.finished.attempts, stream.finished.decode_instance) == (1, busy.name)


async def test_stream_that_outlasts_the_drain_goes_on_elsewhere(tmp_path: Path) -> None:
    with toy_cluster(tmp_path, decode=2, step_ms=5.0, drain_s=0.3) as cluster:
        async with channel(cluster.grpc) as connection:
            client, busy = await streaming(InferenceStub(connection), 600)
            os.kill(busy.pid, signal.SIGTERM)
            stream = await client
            await has_left(cluster, busy.pid)
    assert stream.tokens == toy_tokens(PROMPT, 600, seed=3)
    assert stream.finished is not None
    assert stream.finished.attempts == 2
    assert stream.finished.decode_instance != busy.name


async def test_draining_prefill_instance_ends_what_it_computes(tmp_path: Path) -> None:
    """Its prompt takes ten steps; it is told in the first ones."""
    with toy_cluster(tmp_path, prefill=2, step_ms=200.0) as cluster:
        async with channel(cluster.grpc) as connection:
            stub, stream = InferenceStub(connection), Stream()
            prompt = list(range(640))
            client = asyncio.create_task(follow(stub, request_of(prompt, 3), stream))
            async with asyncio.timeout(30):
                while not (busy := [one for one in (await view(stub)).instances if one.running]):
                    await asyncio.sleep(0.01)
            os.kill(busy[0].pid, signal.SIGTERM)
            await client
            await has_left(cluster, busy[0].pid)
    assert stream.tokens == toy_tokens(prompt, 3)
    assert stream.finished is not None
    assert (stream.finished.attempts, stream.finished.prefill_instance) == (1, busy[0].name)
