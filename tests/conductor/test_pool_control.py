"""The stream of whoever starts instances, and orders that go over it: a real gRPC server, a manager that is a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from segue_proto.v1 import cluster_pb2, cluster_pb2_grpc

from conductor.rpc_pools import PoolControlService
from conductor.rpc_server import RpcServer
from segue.errors import InvalidField, Unavailable
from segue.pool_messages import InstanceChange, InstanceState, ScaleDone


class Control:
    def __init__(self, service: PoolControlService, ended: list[tuple[str, int]], port: int) -> None:
        self.service = service
        self.ended = ended
        self.port = port


@asynccontextmanager
async def control() -> AsyncIterator[Control]:
    ended: list[tuple[str, int]] = []
    service, rpc = PoolControlService(lambda uuid, pid: ended.append((uuid, pid))), RpcServer()
    service.add_to(rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start(())
    try:
        yield Control(service, ended, port)
    finally:
        await rpc.stop()


@asynccontextmanager
async def manager(port: int) -> AsyncIterator[Any]:
    """Its stream, once the Conductor has it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = cluster_pb2_grpc.PoolControlStub(channel).Attach()
        await stream.write(cluster_pb2.PoolMessage(ended=cluster_pb2.ProcessEnded(uuid="hello", pid=1)))
        yield stream
        stream.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def collected(events: AsyncIterator[InstanceChange | ScaleDone]) -> list[InstanceChange | ScaleDone]:
    return [event async for event in events]


def report(op: int, **body: Any) -> cluster_pb2.PoolMessage:
    return cluster_pb2.PoolMessage(report=cluster_pb2.ScaleReport(op=op, **body))


async def test_order_reaches_the_manager_and_its_answers_the_caller() -> None:
    async with control() as conductor, manager(conductor.port) as stream:
        await until(lambda: conductor.ended)
        asked = asyncio.create_task(collected(conductor.service.scale("decode", 2)))
        command = await stream.read()
        assert (command.scale.pool, command.scale.instances) == ("decode", 2)
        await stream.write(report(command.op, change=cluster_pb2.InstanceChange(name="decode-1", state="ready")))
        await stream.write(report(command.op, done=cluster_pb2.ScaleDone(instances=2)))
        assert await asked == [InstanceChange("decode-1", InstanceState.READY), ScaleDone(2)]


async def test_refusal_of_a_field_is_the_callers_fault_and_any_other_the_clusters_state() -> None:
    async with control() as conductor, manager(conductor.port) as stream:
        await until(lambda: conductor.ended)
        for field, kind in (("pool", InvalidField), ("", Unavailable)):
            asked = asyncio.create_task(collected(conductor.service.scale("encode", 2)))
            command = await stream.read()
            await stream.write(report(command.op, refused=cluster_pb2.ScaleRefused(field=field, reason="so it is")))
            with pytest.raises(kind, match="so it is"):
                await asked


async def test_without_a_manager_the_caller_is_told_where_to_turn() -> None:
    async with control() as conductor:
        with pytest.raises(Unavailable, match="on Kubernetes change the replicas"):
            await collected(conductor.service.scale("decode", 2))


async def test_manager_that_leaves_ends_the_orders_it_had() -> None:
    async with control() as conductor:
        async with manager(conductor.port) as stream:
            await until(lambda: conductor.ended)
            asked = asyncio.create_task(collected(conductor.service.scale("decode", 2)))
            await stream.read()
        with pytest.raises(Unavailable, match="the launcher is gone"):
            await asked


async def test_ended_processes_are_passed_on() -> None:
    async with control() as conductor, manager(conductor.port) as stream:
        await stream.write(cluster_pb2.PoolMessage(ended=cluster_pb2.ProcessEnded(uuid="u", pid=7)))
        await until(lambda: ("u", 7) in conductor.ended)


async def test_answers_to_an_order_whose_caller_left_disturb_nobody() -> None:
    async with control() as conductor, manager(conductor.port) as stream:
        await until(lambda: conductor.ended)
        asked = asyncio.create_task(collected(conductor.service.scale("decode", 2)))
        command = await stream.read()
        asked.cancel()
        await stream.write(report(command.op, done=cluster_pb2.ScaleDone(instances=2)))
        again = asyncio.create_task(collected(conductor.service.scale("decode", 3)))
        command = await stream.read()
        await stream.write(report(command.op, done=cluster_pb2.ScaleDone(instances=3)))
        assert await again == [ScaleDone(3)]
