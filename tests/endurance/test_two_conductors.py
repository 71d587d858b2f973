"""Two Conductors over the same instances and a real Redis: what its absence, and the death of one of them, disturb."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
from redis_server import RedisServer
from segue_proto.v1 import inference_pb2
from toy_cluster import (
    LEASE_MS,
    InferenceStub,
    Stream,
    ToyCluster,
    booked,
    channel,
    follow,
    idle_within,
    request_of,
    view,
    wait_for,
)

from worker_runtime.toy_engine import VOCAB_SIZE, toy_tokens

INSTANCES = 4
FORGOTTEN_SECONDS_MAX = 2 * LEASE_MS / 1000 + 4


class Rig:
    """The cluster and a stub for each of its Conductors."""

    def __init__(self, cluster: ToyCluster, stubs: list[Any]) -> None:
        self.cluster = cluster
        self.stubs = stubs


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyCluster]:
    """Whatever a test does to it, it is whole again at the end."""
    folder = tmp_path_factory.mktemp("toy")
    made = ToyCluster(folder, prefill=2, decode=2, step_ms=5.0, conductors=2, redis_url=redis.url)
    yield made
    made.close()


@pytest.fixture
async def rig(cluster: ToyCluster) -> AsyncIterator[Rig]:
    """Once both Conductors know all instances, which were told of one only."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel(address.grpc)) for address in cluster.addresses]
        found = Rig(cluster, [InferenceStub(connection) for connection in channels])
        await both_know_everybody(found)
        yield found


async def both_know_everybody(rig: Rig) -> None:
    async with asyncio.timeout(60):
        for stub in rig.stubs:
            while len((await view(stub)).instances) < INSTANCES:
                await asyncio.sleep(0.05)


def gauge(http: str, name: str) -> float:
    text = httpx.get(f"http://{http}/metrics", trust_env=False).raise_for_status().text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


async def gauges_become(rig: Rig, name: str, value: float) -> None:
    async with asyncio.timeout(60):
        for address in rig.cluster.addresses:
            while await asyncio.to_thread(gauge, address.http, name) != value:
                await asyncio.sleep(0.05)


async def checked(stub: Any, seed: int, tokens_max: int = 200) -> Stream:
    """One stream, whose every token is right."""
    prompt = [random.Random(seed).randrange(VOCAB_SIZE) for _ in range(5 + seed % 60)]
    stream = await follow(stub, request_of(prompt, tokens_max, seed), Stream())
    assert stream.tokens == toy_tokens(prompt, tokens_max, seed)
    return stream


async def test_redis_stopped_and_started_again_under_load_fails_no_request(rig: Rig, redis: RedisServer) -> None:
    await gauges_become(rig, "segue:conductors", 2)
    running = [asyncio.create_task(checked(rig.stubs[seed % 2], seed)) for seed in range(10)]
    await asyncio.sleep(0.3)
    redis.stop()
    await gauges_become(rig, "segue:directory_up", 0)
    running += [asyncio.create_task(checked(rig.stubs[seed % 2], seed)) for seed in range(10, 16)]
    await asyncio.sleep(LEASE_MS / 1000)
    redis.start()
    await gauges_become(rig, "segue:directory_up", 1)
    streams = await asyncio.gather(*running)
    assert {stream.finished.attempts for stream in streams if stream.finished is not None} == {1}
    await gauges_become(rig, "segue:conductors", 2)
    assert [len((await view(stub)).instances) for stub in rig.stubs] == [INSTANCES, INSTANCES]
    assert await idle_within(rig.stubs[0], 5.0) is not None


async def test_a_conductor_that_is_killed_takes_only_its_own_streams_along(rig: Rig) -> None:
    """The other's go on undisturbed, what the dead one had is free before long, and it serves again at its address."""
    dead, alive = rig.stubs
    kept = [asyncio.create_task(checked(alive, seed, 600)) for seed in range(6)]
    lost = [asyncio.create_task(checked(dead, seed, 1500)) for seed in range(6)]
    await asyncio.sleep(0.7)
    os.kill(rig.cluster.fronts.pids()["front-0"], signal.SIGKILL)
    for outcome in await asyncio.gather(*lost, return_exceptions=True):
        assert isinstance(outcome, grpc.aio.AioRpcError)
        assert outcome.code() is grpc.StatusCode.UNAVAILABLE
    streams = await asyncio.gather(*kept)
    assert {stream.finished.attempts for stream in streams if stream.finished is not None} == {1}
    assert await idle_within(alive, FORGOTTEN_SECONDS_MAX) is not None, "the dead one's pages are not free"
    assert await asyncio.to_thread(booked, rig.cluster.addresses[1].http) == 0
    async with channel(rig.cluster.grpc) as connection:
        rig.stubs[0] = InferenceStub(connection)
        await back_in_service(rig.stubs[0])
        await asyncio.to_thread(wait_for, lambda: "front-0 serves again" in rig.cluster.said)
        await asyncio.gather(*(checked(stub, seed) for seed in range(3) for stub in rig.stubs))


async def back_in_service(stub: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if len((await view(stub)).instances) == INSTANCES:
                    return
            except grpc.aio.AioRpcError:
                pass  # it starts
            await asyncio.sleep(0.05)


async def test_each_sees_the_others_work_on_the_instances(rig: Rig) -> None:
    """Otherwise both would book the same room."""
    working, watching = rig.stubs
    running = [asyncio.create_task(checked(working, seed, 400)) for seed in range(6)]
    async with asyncio.timeout(30):
        while sum(one.running for one in await decodes(watching)) < 6:
            await asyncio.sleep(0.05)
    assert sum(one.pages_active for one in await decodes(watching)) > 0
    await asyncio.gather(*running)


async def decodes(stub: Any) -> list[inference_pb2.Instance]:
    return [one for one in (await view(stub)).instances if one.role == "decode"]


async def test_prefixes_cached_by_one_are_found_by_the_other_for_a_tenant(rig: Rig) -> None:
    """They agreed on the secret that salts its block hashes."""
    request = request_of(list(range(64)), 4)
    request.tenant = "gold"
    cached = []
    for stub in (rig.stubs[0], rig.stubs[1]):
        await asyncio.sleep(1.5)  # a report later
        stream = await follow(stub, request, Stream())
        assert stream.finished is not None
        cached.append(stream.finished.usage.tokens_cached)
    assert cached[0] == 0
    assert cached[1] >= 60


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_deaths_of_conductors_and_of_redis(rig: Rig, redis: RedisServer) -> None:
    """A client whose stream ends with UNAVAILABLE asks the other Conductor; nothing else is an error, nothing leaks."""
    rng = random.Random(7)
    calm = asyncio.Event()
    clients = [asyncio.create_task(_insisting(rig, number, calm)) for number in range(30)]
    for round_ in range(20):
        await asyncio.sleep(rng.uniform(1.0, 3.0))
        if round_ % 4 == 3:
            redis.stop()
            await asyncio.sleep(rng.uniform(0.1, 3.0))
            redis.start()
        else:
            pids = rig.cluster.fronts.pids()
            os.kill(pids[rng.choice(sorted(pids))], signal.SIGKILL)
            await both_back(rig)
    calm.set()
    streams = sum(await asyncio.gather(*clients))
    assert streams > 60
    assert await idle_within(rig.stubs[0], FORGOTTEN_SECONDS_MAX) is not None


async def both_back(rig: Rig) -> None:
    for stub in rig.stubs:
        await back_in_service(stub)


async def _insisting(rig: Rig, number: int, calm: asyncio.Event) -> int:
    rng, done = random.Random(number), 0
    while not calm.is_set():
        try:
            await checked(rng.choice(rig.stubs), rng.randrange(1 << 20), rng.choice((40, 200, 600)))
            done += 1
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, f"{error.code()} {error.details()}"
            await asyncio.sleep(0.05)
    return done
