"""Control streams are cut while requests run: they are dialled again, and nothing is lost, doubled or left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from byte_proxy import ByteProxy
from endurance_rows import record
from kill_storm import StormReport, clients, until
from toy_cluster import InferenceStub, Stream, ToyCluster, booked, channel, follow, idle_within, request_of, toy_cluster

from worker_runtime.toy_engine import toy_tokens

STREAMS = 30


@contextmanager
def behind_proxy(folder: Path, **options: object) -> Iterator[tuple[ToyCluster, ByteProxy]]:
    """Instances reach the Conductor through a proxy; tokens go to the gateway straight."""
    proxies: list[ByteProxy] = []

    def through(address: str) -> str:
        proxies.append(ByteProxy(address))
        return proxies[-1].location

    try:
        with toy_cluster(folder, conductor=through, **options) as cluster:
            yield cluster, proxies[-1]
    finally:
        for proxy in proxies:
            proxy.close()


def cut(proxy: ByteProxy) -> None:
    """Break the connection that carries the next byte to the Conductor."""
    proxy.faults.cut_at = proxy.bytes_seen


@pytest.mark.parametrize("cuts", [12, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_cut_control_streams_lose_double_and_leave_nothing(tmp_path: Path, cuts: int) -> None:
    report, calm, rng = StormReport(), asyncio.Event(), random.Random(cuts)
    with behind_proxy(tmp_path, step_ms=5.0) as (cluster, proxy):
        async with channel(cluster.grpc) as connection:
            stub = InferenceStub(connection)
            before = proxy.connections
            running = clients(stub, STREAMS, rng, calm, report)
            for _ in range(cuts):
                await asyncio.sleep(rng.uniform(0.2, 0.6))
                cut(proxy)
                await until(lambda: 1 if proxy.faults.cut_at is None else None)
            calm.set()
            await asyncio.gather(*running)
            assert proxy.connections - before >= cuts, "the streams were not cut"
            assert report.faults == []
            await asyncio.sleep(1.0)
            assert await idle_within(stub, 1.0) is not None, "pages are still in use"
        assert booked(cluster.http) == 0
    shape = f"{cuts} cuts of control streams, {STREAMS} streams"
    record(shape, "streams", float(report.streams), "")
    record(shape, "streams planned again", float(report.replanned), "")


async def test_stream_under_way_does_not_notice_that_its_control_stream_is_cut(tmp_path: Path) -> None:
    with behind_proxy(tmp_path, step_ms=5.0) as (cluster, proxy):
        async with channel(cluster.grpc) as connection:
            stream, before = Stream(), proxy.connections
            client = asyncio.create_task(follow(InferenceStub(connection), request_of([7] * 30, 500, seed=2), stream))
            await until(lambda: 1 if len(stream.tokens) > 20 else None)
            for _ in range(2):
                cut(proxy)
                await until(lambda: 1 if proxy.faults.cut_at is None else None)
            await client
            assert proxy.connections - before >= 2
    assert stream.tokens == toy_tokens([7] * 30, 500, seed=2)
    assert stream.finished is not None
    assert stream.finished.attempts == 1
