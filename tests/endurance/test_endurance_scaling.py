"""Pools that grow and shrink while streams run: every token of every stream is checked."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from endurance_rows import record
from kill_storm import StormReport, clients, until
from toy_cluster import InferenceStub, ToyCluster, booked, channel, idle_within, shared_memory_of, toy_cluster, view

from launcher.rpc_client import ClientError, SegueClient
from launcher.supervision import RestartLimits
from segue.pool_messages import InstanceChange, InstanceState, ScaleDone

STREAMS = 30


def scale(cluster: ToyCluster, pool: str, instances: int) -> list[InstanceChange | ScaleDone]:
    with SegueClient(cluster.grpc) as client:
        return list(client.scale(pool, instances))


def states(events: list[InstanceChange | ScaleDone], name: str) -> list[InstanceState]:
    return [event.state for event in events if isinstance(event, InstanceChange) and event.name == name]


async def resized(cluster: ToyCluster, sizes: list[tuple[str, int]], report: StormReport, pause_s: float) -> None:
    """Ask for one size after the other, each while streams run on the pools as they are."""
    for pool, instances in sizes:
        before = report.streams
        await until(lambda before=before: 1 if report.streams >= before + STREAMS else None)  # type: ignore[misc]
        events = await asyncio.to_thread(scale, cluster, pool, instances)
        assert events[-1] == ScaleDone(instances)
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([("decode", 3), ("prefill", 3), ("decode", 1), ("prefill", 1)], id="once"),
        pytest.param(
            [(pool, size) for _ in range(5) for pool in ("decode", "prefill") for size in (3, 1)],
            id="again and again",
            marks=[pytest.mark.slow, pytest.mark.timeout(900)],
        ),
    ],
)
async def test_pool_grows_and_shrinks_under_streams_and_none_fails_or_changes(
    short_path: Path, sizes: list[tuple[str, int]]
) -> None:
    with toy_cluster(short_path, step_ms=5.0) as cluster:
        report, calm = StormReport(), asyncio.Event()
        async with channel(cluster.grpc) as connection:
            stub = InferenceStub(connection)
            running = clients(stub, STREAMS, random.Random(1), calm, report)
            await resized(cluster, sizes, report, pause_s=0.3)
            calm.set()
            await asyncio.gather(*running)
            assert report.faults == []
            assert sorted(cluster.pids()) == ["decode-0", "prefill-0"]
            await asyncio.sleep(1.0)
            assert await idle_within(stub, 1.0) is not None, "pages are still in use"
            assert sorted(one.name for one in (await view(stub)).instances) == ["decode-0", "prefill-0"]
        assert booked(cluster.http) == 0
        assert len(shared_memory_of(cluster.prefix)) == 1
        assert len(list(short_path.glob("*-control"))) == 2, "sockets of instances that are gone"
    shape = f"{len(sizes)} changes of size, {STREAMS} streams"
    record(shape, "streams", float(report.streams), "")
    record(shape, "streams planned again", float(report.replanned), "")


async def test_new_instances_serve_and_old_ones_leave_in_order(tmp_path: Path) -> None:
    with toy_cluster(tmp_path, step_ms=2.0) as cluster:
        grown = await asyncio.to_thread(scale, cluster, "decode", 2)
        assert states(grown, "decode-1") == [InstanceState.STARTING, InstanceState.READY]
        assert sorted(cluster.pids()) == ["decode-0", "decode-1", "prefill-0"]
        shrunk = await asyncio.to_thread(scale, cluster, "decode", 1)
        assert states(shrunk, "decode-1") == [InstanceState.DRAINING, InstanceState.GONE]
        assert not any("starts again" in text for text in cluster.said)


@pytest.mark.parametrize(
    ("pool", "instances", "reason"),
    [
        ("decode", 0, "instances: 0: without a decode instance"),
        ("encode", 2, "pool: 'encode' is no pool: known are prefill, decode"),
        ("prefill", 2000, "instances: 2000 beside 1 other instances: a cluster has at most 1024"),
    ],
)
def test_impossible_size_is_refused_with_the_reason(
    cluster: ToyCluster, pool: str, instances: int, reason: str
) -> None:
    with pytest.raises(ClientError) as refused:
        scale(cluster, pool, instances)
    assert refused.value.status == "INVALID_ARGUMENT"
    assert reason in str(refused.value)
    assert sorted(cluster.pids()) == ["decode-0", "prefill-0"]


async def test_instance_that_cannot_start_is_given_up_and_the_pool_keeps_what_serves(tmp_path: Path) -> None:
    limits = RestartLimits(stable_us=1, backoff_first_us=100_000, deaths_max=4)
    with toy_cluster(tmp_path, limits=limits) as cluster:
        cluster.fail_file.write_text("decode-1")
        events = await asyncio.to_thread(scale, cluster, "decode", 2)
        assert states(events, "decode-1")[-1] is InstanceState.FAILED
        assert any("told to fail" in event.reason for event in events if isinstance(event, InstanceChange))
        assert events[-1] == ScaleDone(1)
        cluster.fail_file.unlink()
        assert (await asyncio.to_thread(scale, cluster, "decode", 2))[-1] == ScaleDone(2)
