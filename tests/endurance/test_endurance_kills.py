"""Processes are killed, stopped or fail to start while streams run: the streams go on, position by position."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from endurance_rows import record
from kill_storm import StormReport, storm, until
from segue_proto.v1 import inference_pb2
from toy_cluster import (
    InferenceStub,
    Stream,
    ToyCluster,
    booked,
    channel,
    follow,
    idle_within,
    request_of,
    shared_memory_of,
    toy_cluster,
    view,
)

from launcher.supervision import RestartLimits
from worker_runtime.toy_engine import toy_tokens

STREAMS = 30


async def assert_nothing_is_left(cluster: ToyCluster, instances: int) -> None:
    """All slots serve again, no page is in use, nothing is booked, and no dead instance's pool is in memory."""
    await until(lambda: len(cluster.pids()) if len(cluster.pids()) == instances else None)
    async with channel(cluster.grpc) as connection:
        stub = InferenceStub(connection)
        await asyncio.sleep(1.0)
        assert await idle_within(stub, 1.0) is not None, "pages are still in use"
        assert len((await view(stub)).instances) == instances
    assert booked(cluster.http) == 0
    assert len(shared_memory_of(cluster.prefix)) == sum(name.startswith("decode") for name in cluster.pids())


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_no_stream_is_lost_or_altered_when_instances_are_killed(tmp_path: Path, kills: int) -> None:
    with toy_cluster(tmp_path, prefill=2, decode=2, step_ms=5.0) as cluster:
        report = await storm(cluster, streams=STREAMS, kills=kills, seed=kills, pause_s=(0.1, 0.6))
        assert report.faults == []
        assert report.replanned > 0, "no stream was hit: nothing was shown"
        await assert_nothing_is_left(cluster, instances=4)
    publish(report, f"{kills} x kill -9, {STREAMS} streams")


def publish(report: StormReport, shape: str) -> None:
    record(shape, "streams", float(report.streams), "")
    record(shape, "streams planned again", float(report.replanned), "")
    record(shape, "most attempts", float(report.attempts_most), "")
    record(shape, "recovery gap p50", report.gap_s(0.5) * 1000, "ms")
    record(shape, "recovery gap p99", report.gap_s(0.99) * 1000, "ms")


async def one_stream(cluster: ToyCluster, tokens_max: int, stream: Stream) -> None:
    prompt = list(range(50))
    async with channel(cluster.grpc) as connection:
        await follow(InferenceStub(connection), request_of(prompt, tokens_max, seed=3), stream)
    assert stream.tokens == toy_tokens(prompt, tokens_max, seed=3)


async def busy_decode(stub: Any) -> inference_pb2.Instance:
    """The one that runs the only stream, once its load report says so."""
    async with asyncio.timeout(30):
        while not (busy := [one for one in (await view(stub)).instances if one.running and one.role == "decode"]):
            await asyncio.sleep(0.02)
    return busy[0]


async def under_way(stream: Stream) -> None:
    """Past the first steps, which a watchdog allows to be slow."""
    await until(lambda: len(stream.tokens) if len(stream.tokens) > 40 else None)


@pytest.mark.slow
async def test_stream_rides_out_the_death_of_the_only_pair(tmp_path: Path) -> None:
    """Both at once: it waits for them to come back."""
    with toy_cluster(tmp_path, step_ms=5.0) as cluster:
        stream = Stream()
        client = asyncio.create_task(one_stream(cluster, 200, stream))
        await under_way(stream)
        for pid in cluster.pids().values():
            os.kill(pid, signal.SIGKILL)
        await client
        assert stream.finished is not None
        assert stream.finished.attempts > 1
        await assert_nothing_is_left(cluster, instances=2)


async def test_stream_leaves_an_instance_that_ends_in_order_once(tmp_path: Path) -> None:
    """It says that it takes nothing new before it gives up what it has: the stream is not planned onto it again."""
    with toy_cluster(tmp_path, decode=2, step_ms=5.0) as cluster:
        stream = Stream()
        client = asyncio.create_task(one_stream(cluster, 600, stream))
        await under_way(stream)
        async with channel(cluster.grpc) as connection:
            busy = await busy_decode(InferenceStub(connection))
        os.kill(busy.pid, signal.SIGINT)
        await client
        assert stream.finished is not None
        assert stream.finished.attempts == 2


@pytest.mark.slow
async def test_streams_of_a_stopped_instance_go_on_elsewhere_and_its_late_messages_are_refused(tmp_path: Path) -> None:
    """A decode instance hangs in the middle of a stream, and wakes up after that has ended elsewhere."""
    with toy_cluster(tmp_path, decode=2, step_ms=5.0) as cluster:
        stream = Stream()
        client = asyncio.create_task(one_stream(cluster, 1000, stream))
        await under_way(stream)
        async with channel(cluster.grpc) as connection:
            stub = InferenceStub(connection)
            busy = await busy_decode(stub)
            os.kill(busy.pid, signal.SIGSTOP)
            await client
            assert stream.finished is not None
            assert stream.finished.decode_instance != busy.name
            os.kill(busy.pid, signal.SIGCONT)
        await assert_nothing_is_left(cluster, instances=3)


@pytest.mark.slow
async def test_front_that_stood_still_takes_nobody_for_lost(tmp_path: Path) -> None:
    """It has not read for longer than three heartbeats, but they were sent."""
    with toy_cluster(tmp_path, step_ms=5.0) as cluster:
        stream = Stream()
        client = asyncio.create_task(one_stream(cluster, 600, stream))
        await under_way(stream)
        (front,) = cluster.fronts.pids().values()
        os.kill(front, signal.SIGSTOP)
        await asyncio.sleep(5.0)
        os.kill(front, signal.SIGCONT)
        await client
        assert stream.finished is not None
        assert stream.finished.attempts == 1


@pytest.mark.slow
async def test_hung_instance_is_killed_and_replaced(tmp_path: Path) -> None:
    with toy_cluster(tmp_path, step_ms=5.0) as cluster:
        stream, hung = Stream(), cluster.pids()["prefill-0"]
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: pid if (pid := cluster.pids().get("prefill-0", hung)) != hung else None)
        await one_stream(cluster, 50, stream)
        assert stream.finished is not None
        assert stream.finished.prefill_instance == "prefill-0"
        await assert_nothing_is_left(cluster, instances=2)


@pytest.mark.slow
async def test_engine_that_hangs_in_a_step_ends_its_process(tmp_path: Path) -> None:
    """The I/O loop still beats: only the instance itself can tell."""
    with toy_cluster(tmp_path, step_ms=5.0) as cluster:
        stream = Stream()
        client = asyncio.create_task(one_stream(cluster, 400, stream))
        await under_way(stream)
        cluster.hang_file.write_text(str(cluster.pids()["decode-0"]))
        await client
        assert stream.finished is not None
        assert stream.finished.attempts == 2
        assert any("decode-0 exited" in text for text in cluster.said)
        await assert_nothing_is_left(cluster, instances=2)


async def test_crash_loop_is_given_up_and_the_rest_serves_on(tmp_path: Path) -> None:
    limits = RestartLimits(stable_us=60_000_000, backoff_first_us=10_000, deaths_max=2)
    with toy_cluster(tmp_path, decode=2, limits=limits) as cluster:
        cluster.fail_file.write_text("decode-0")
        os.kill(cluster.pids()["decode-0"], signal.SIGKILL)
        await until(lambda: 1 if any("given up" in text for text in cluster.said) else None)
        assert "told to fail" in cluster.said[-1]
        await one_stream(cluster, 50, Stream())
        assert cluster.ended is None


@pytest.mark.slow
async def test_cluster_ends_when_nobody_is_left_to_serve(tmp_path: Path) -> None:
    limits = RestartLimits(stable_us=60_000_000, backoff_first_us=10_000, deaths_max=1)
    with toy_cluster(tmp_path, limits=limits) as cluster:
        cluster.fail_file.write_text("decode-0")
        os.kill(cluster.pids()["decode-0"], signal.SIGKILL)
        await until(lambda: 1 if cluster.ended is not None else None)
        assert cluster.ended is not None
        assert cluster.ended.name == "decode-0"
