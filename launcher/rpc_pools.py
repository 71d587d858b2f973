"""The launcher's stream to the Conductor: orders to scale come in, what becomes of them goes out.

A thread of its own reads, so that the launcher's loop only looks into a queue. A broken stream is dialled again; the
orders that came over it go on, and what is said about them then goes to nobody.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import grpc
from segue_proto.v1 import cluster_pb2, cluster_pb2_grpc

from segue.pool_messages import InstanceChange, ScaleAnswer, ScaleDone, ScaleOrder, ScaleRefused

RECONNECT_S = 0.5


class PoolLink:
    """`front` is the Conductor's gRPC address. Used by one thread; `close` ends the reader."""

    def __init__(self, front: str) -> None:
        self._front = front
        self._orders: queue.SimpleQueue[ScaleOrder] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[cluster_pb2.PoolMessage | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="pool link", daemon=True)
        self._thread.start()

    def orders(self) -> list[ScaleOrder]:
        """What came since the last call."""
        taken = []
        while not self._orders.empty():
            taken.append(self._orders.get())
        return taken

    def answer(self, op: int, answer: ScaleAnswer) -> None:
        self._outgoing.put(cluster_pb2.PoolMessage(report=_report_to_pb(op, answer)))

    def ended(self, uuid: str, pid: int) -> None:
        """The process that registered as `uuid` is no more."""
        self._outgoing.put(cluster_pb2.PoolMessage(ended=cluster_pb2.ProcessEnded(uuid=uuid, pid=pid)))

    def close(self) -> None:
        self._closed.set()
        self._outgoing.put(None)
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join()

    def _run(self) -> None:
        with grpc.insecure_channel(self._front, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = cluster_pb2_grpc.PoolControlStub(channel)
            while not self._closed.is_set():
                self._outgoing = queue.SimpleQueue()
                self._call = stub.Attach(_messages(self._outgoing))
                if self._closed.is_set():
                    self._call.cancel()
                self._read(self._call)
                self._outgoing.put(None)
                self._closed.wait(RECONNECT_S)

    def _read(self, commands: Iterator[cluster_pb2.PoolCommand]) -> None:
        try:
            for command in commands:
                scale = command.scale
                self._orders.put(ScaleOrder(op=command.op, pool=scale.pool, instances=scale.instances))
        except grpc.RpcError:
            return  # dialled again; what matters is that the front lives, and its process is watched


class PoolLinks:
    """Links to several Conductors as if to one: an operator may order from any of them. Each counts its orders by
    itself, so their numbers are told apart here."""

    def __init__(self, fronts: Sequence[str]) -> None:
        self._links = [PoolLink(front) for front in fronts]

    def orders(self) -> list[ScaleOrder]:
        count = len(self._links)
        return [
            ScaleOrder(op=order.op * count + number, pool=order.pool, instances=order.instances)
            for number, link in enumerate(self._links)
            for order in link.orders()
        ]

    def answer(self, op: int, answer: ScaleAnswer) -> None:
        op, number = divmod(op, len(self._links))
        self._links[number].answer(op, answer)

    def ended(self, uuid: str, pid: int) -> None:
        for link in self._links:
            link.ended(uuid, pid)

    def close(self) -> None:
        for link in self._links:
            link.close()


def _messages(
    outgoing: queue.SimpleQueue[cluster_pb2.PoolMessage | None],
) -> Iterator[cluster_pb2.PoolMessage]:
    while (message := outgoing.get()) is not None:
        yield message


def _report_to_pb(op: int, answer: ScaleAnswer) -> cluster_pb2.ScaleReport:
    match answer:
        case InstanceChange():
            change = cluster_pb2.InstanceChange(name=answer.name, state=answer.state.value, reason=answer.reason)
            return cluster_pb2.ScaleReport(op=op, change=change)
        case ScaleDone():
            return cluster_pb2.ScaleReport(op=op, done=cluster_pb2.ScaleDone(instances=answer.instances))
        case ScaleRefused():
            refused = cluster_pb2.ScaleRefused(field=answer.field, reason=answer.reason)
            return cluster_pb2.ScaleReport(op=op, refused=refused)
