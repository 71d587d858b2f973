"""PoolControl: the stream of whoever starts and ends this cluster's instances, and the orders that go over it.

The Conductor starts no process. It hands an order on to the pool manager that attached last (a launcher; on Kubernetes
there is none, replicas are changed there), and its answers back to the caller. A manager also says which processes have
ended, so that their instances need not be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from segue_proto.v1 import cluster_pb2

from segue.errors import InvalidField, Unavailable
from segue.pool_messages import InstanceChange, InstanceState, ScaleAnswer, ScaleDone, ScaleRefused

log = logging.getLogger(__name__)

SERVICE_NAME = cluster_pb2.DESCRIPTOR.services_by_name["PoolControl"].full_name

ORDERS_OPEN_MAX = 64
"""Operators waiting at once; a new order for a pool ends the one before it."""

ATTACH_S_MAX = 2.0
"""A launcher attaches when its cluster is up, and again after a broken stream: an order waits so long for it."""

NO_MANAGER = (
    "nothing that starts instances is attached to this Conductor; on Kubernetes change the replicas of the pool "
    "(helm upgrade --set decode.replicas=N)"
)
MANAGER_LEFT = "the launcher is gone: the pool may be half way to its new size"


class _Manager:
    """One attached stream. Calls only queue."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[cluster_pb2.PoolCommand] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Queue[ScaleAnswer | None]] = {}

    @asynccontextmanager
    async def order(self, pool: str, instances: int) -> AsyncIterator[asyncio.Queue[ScaleAnswer | None]]:
        """Hand it on; its answers come through the queue, None when the manager is gone."""
        if len(self._waiting) >= ORDERS_OPEN_MAX:
            raise Unavailable(f"{ORDERS_OPEN_MAX} orders to scale are open")
        op = secrets.randbits(63)
        answers = self._waiting[op] = asyncio.Queue()
        scale = cluster_pb2.ScaleRequest(pool=pool, instances=instances)
        self.outgoing.put_nowait(cluster_pb2.PoolCommand(op=op, scale=scale))
        try:
            yield answers
        finally:
            self._waiting.pop(op, None)

    def answered(self, report: cluster_pb2.ScaleReport) -> None:
        """Answers to an order whose caller has left go nowhere."""
        answers = self._waiting.get(report.op)
        if answers is not None:
            answers.put_nowait(_answer_from_pb(report))

    def gone(self) -> None:
        for answers in self._waiting.values():
            answers.put_nowait(None)
        self._waiting.clear()


class PoolControlService:
    """Implements `conductor.ports.PoolPort`. `ended` is told (uuid, pid) of processes that are no more."""

    def __init__(self, ended: Callable[[str, int], None]) -> None:
        self._ended = ended
        self._managers: list[_Manager] = []
        self._attached = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        attach = grpc.stream_stream_rpc_method_handler(
            self.attach,
            request_deserializer=cluster_pb2.PoolMessage.FromString,
            response_serializer=cluster_pb2.PoolCommand.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Attach": attach}),))

    async def attach(
        self,
        messages: AsyncIterator[cluster_pb2.PoolMessage],
        context: grpc.aio.ServicerContext[cluster_pb2.PoolMessage, cluster_pb2.PoolCommand],
    ) -> AsyncIterator[cluster_pb2.PoolCommand]:
        manager = _Manager()
        self._managers.append(manager)
        self._attached.set()
        reader = asyncio.create_task(self._read(manager, messages), name="pool manager stream")
        sender = asyncio.create_task(manager.outgoing.get())
        try:
            while True:
                await asyncio.wait([reader, sender], return_when=asyncio.FIRST_COMPLETED)
                if not sender.done():
                    return
                yield sender.result()
                sender = asyncio.create_task(manager.outgoing.get())
        finally:
            self._managers.remove(manager)
            if not self._managers:
                self._attached.clear()
            manager.gone()
            reader.cancel()
            sender.cancel()
            await asyncio.gather(reader, sender, return_exceptions=True)

    async def scale(self, pool: str, instances: int) -> AsyncIterator[InstanceChange | ScaleDone]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._attached.wait(), ATTACH_S_MAX)
        if not self._managers:
            raise Unavailable(NO_MANAGER)
        async with self._managers[-1].order(pool, instances) as answers:
            while True:
                match await answers.get():
                    case None:
                        raise Unavailable(MANAGER_LEFT)
                    case ScaleRefused(field="", reason=reason):
                        raise Unavailable(reason)
                    case ScaleRefused(field=field, reason=reason):
                        raise InvalidField(field, reason)
                    case ScaleDone() as done:
                        yield done
                        return
                    case InstanceChange() as change:
                        yield change

    async def _read(self, manager: _Manager, messages: AsyncIterator[cluster_pb2.PoolMessage]) -> None:
        """Everything the manager says; what it says wrong ends its stream."""
        try:
            async for message in messages:
                match message.WhichOneof("body"):
                    case "report":
                        manager.answered(message.report)
                    case "ended":
                        self._ended(message.ended.uuid, message.ended.pid)
        except ValueError:
            log.exception("the stream of a pool manager failed")


def _answer_from_pb(report: cluster_pb2.ScaleReport) -> ScaleAnswer:
    match report.WhichOneof("body"):
        case "change":
            change = report.change
            return InstanceChange(change.name, InstanceState(change.state), change.reason)
        case "refused":
            return ScaleRefused(report.refused.field, report.refused.reason)
        case _:
            return ScaleDone(report.done.instances)
