"""A cluster on local Ray, as `segue up` starts it: actors are killed, pools change size, no stream fails or changes.

The model is a small random Llama in fp32; every answer must be the one that the cluster gave in peace.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_process import ClusterProcess
from endurance_rows import record
from kill_storm import StormReport, until
from replayed_requests import learn, repeat
from segue_proto.v1 import inference_pb2
from toy_cluster import InferenceStub, booked, channel, idle_within, view
from toy_model import write_toy_model

from launcher.rpc_client import SegueClient
from segue.pool_messages import InstanceChange, ScaleDone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STREAMS = 30
KNOWN = 40
VOCABULARY = 256
KILLS = int(os.environ.get("SEGUE_RAY_KILLS", "20"))
SOUND_S = 11.0
"""One that served for so long is started again whatever happens; killed young again and again, it would be given up."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy-llama"
    write_toy_model(folder)
    return folder


@contextmanager
def ray_cluster(model: Path, *options: str) -> Iterator[ClusterProcess]:
    cluster = ClusterProcess(["--model", str(model), "--kv-memory", "64MiB", "--threads", "1", *options])
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        status = cluster.close()
    assert status == 0, cluster.output


class Victims:
    """Instances that have served long enough to be killed; never the last decode instance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[int, float] = {}
        self._killed: set[int] = set()

    async def kill_one(self, stub: Any) -> None:
        pid = (await self._choose(stub)).pid
        self._killed.add(pid)  # listed for a moment longer
        os.kill(pid, signal.SIGKILL)

    async def _choose(self, stub: Any) -> inference_pb2.Instance:
        async with asyncio.timeout(120):
            while not (found := self._sound((await view(stub)).instances)):
                await asyncio.sleep(0.1)
        return self._rng.choice(found)

    def _sound(self, instances: Any) -> list[inference_pb2.Instance]:
        now = time.monotonic()
        alive = [one for one in instances if one.pid not in self._killed]
        self._since = {one.pid: self._since.get(one.pid, now) for one in alive}
        decodes = sum(one.role == "decode" for one in alive)
        sound = [one for one in alive if now - self._since[one.pid] >= SOUND_S]
        return [one for one in sound if one.role != "decode" or decodes > 1]


async def at_rest(stub: Any, http: str, instances: int) -> None:
    async with asyncio.timeout(120):
        while len((await view(stub)).instances) != instances:
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    assert await idle_within(stub, 1.0) is not None, "pages are still in use"
    assert booked(http.removeprefix("http://")) == 0


async def test_no_stream_is_lost_or_altered_when_actors_are_killed(model: Path) -> None:
    report, rng, calm = StormReport(), random.Random(KILLS), asyncio.Event()
    with ray_cluster(model, "--prefill", "2", "--decode", "2") as cluster:
        async with channel(cluster.grpc) as connection:
            stub, victims = InferenceStub(connection), Victims(rng)
            running = repeat(stub, await learn(stub, KNOWN, VOCABULARY), STREAMS, calm, report)
            for _ in range(KILLS):
                await victims.kill_one(stub)
                report.kills += 1
                await asyncio.sleep(rng.uniform(0.2, 2.0))
            calm.set()
            await asyncio.gather(*running)
            assert report.faults == []
            assert report.replanned > 0, "no stream was hit: nothing was shown"
            await at_rest(stub, cluster.http, instances=4)
        assert "(raylet)" not in cluster.output, "Ray talks to the operator"
    shape = f"{KILLS} x kill -9 of Ray actors, {STREAMS} streams"
    record(shape, "streams", float(report.streams), "")
    record(shape, "streams planned again", float(report.replanned), "")
    record(shape, "most attempts", float(report.attempts_most), "")
    record(shape, "recovery gap p50", report.gap_s(0.5) * 1000, "ms")
    record(shape, "recovery gap p99", report.gap_s(0.99) * 1000, "ms")


def scale(address: str, pool: str, instances: int) -> list[InstanceChange | ScaleDone]:
    with SegueClient(address) as client:
        return list(client.scale(pool, instances))


async def test_pools_of_actors_grow_and_shrink_under_streams(model: Path) -> None:
    report, calm = StormReport(), asyncio.Event()
    with ray_cluster(model) as cluster:
        async with channel(cluster.grpc) as connection:
            stub = InferenceStub(connection)
            running = repeat(stub, await learn(stub, KNOWN, VOCABULARY), STREAMS, calm, report)
            for pool, instances in (("decode", 3), ("prefill", 3), ("decode", 1), ("prefill", 1)):
                before = report.streams
                await until(lambda before=before: 1 if report.streams > before + STREAMS else None)  # type: ignore[misc]
                events = await asyncio.to_thread(scale, cluster.grpc, pool, instances)
                assert events[-1] == ScaleDone(instances)
            calm.set()
            await asyncio.gather(*running)
            assert report.faults == []
            await at_rest(stub, cluster.http, instances=2)
    shape = f"each pool of Ray actors 1 -> 3 -> 1, {STREAMS} streams"
    record(shape, "streams", float(report.streams), "")
    record(shape, "streams planned again", float(report.replanned), "")


async def test_sigterm_lets_an_actor_end_its_stream(model: Path) -> None:
    with ray_cluster(model, "--decode", "2") as cluster:
        async with channel(cluster.grpc) as connection:
            stub, report, calm = InferenceStub(connection), StormReport(), asyncio.Event()
            running = repeat(stub, await learn(stub, 8, VOCABULARY), 8, calm, report)
            await until(lambda: 1 if report.streams > 16 else None)
            victim = next(one for one in (await view(stub)).instances if one.role == "decode" and one.running)
            os.kill(victim.pid, signal.SIGTERM)
            await asyncio.to_thread(cluster.wait_for_text, f"{victim.name} ended")
            calm.set()
            await asyncio.gather(*running)
            assert report.faults == []
