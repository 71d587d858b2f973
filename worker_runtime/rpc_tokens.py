"""Token streams to the gateways: one `TokenLink.Push` stream for each gateway that owns a request of this worker.

A batch is kept until it is acknowledged. A broken stream is dialled again within the lease and unacknowledged batches
are pushed once more; positions make the repetition harmless. A gateway that stays away for a whole lease is lost, and
its requests are cancelled: nobody reads what they produce.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import grpc
from segue_proto.convert import cancel_from_pb, delta_to_pb, ref_to_pb
from segue_proto.v1 import worker_pb2, worker_pb2_grpc

from segue.ids import AttemptRef, InstanceRef
from segue.wire_version import METADATA_KEY, WIRE_VERSION
from segue.worker_messages import TokenDelta
from worker_runtime.backoff import Backoff
from worker_runtime.events import CancelRequested, Event, GatewayLost
from worker_runtime.rpc_control import CHANNEL_OPTIONS
from worker_runtime.rpc_stream import converse

log = logging.getLogger(__name__)

BATCHES_UNACKNOWLEDGED_MAX = 8192
"""About a minute of steps: a gateway that does not acknowledge for so long is as good as lost."""

IDLE_S_MAX = 60.0
"""A stream that has carried nothing for so long is closed; the next token opens it again."""


class GatewayLink:
    """One gateway. `run` ends when the gateway is lost or the link has been idle; it may then be dropped."""

    def __init__(
        self, address: str, ref: InstanceRef, name: str, lease_s: float, post: Callable[[Event], None]
    ) -> None:
        self.address = address
        self._ref = ref_to_pb(ref)
        self._name = name
        self._lease_s = lease_s
        self._post = post
        self._queue: deque[worker_pb2.TokenBatch] = deque()
        """Batches not acknowledged yet; the first `_sent` of them are on the current stream."""
        self._sent = 0
        self._acknowledged = 0
        self._something = asyncio.Event()
        self._away_since: float | None = None
        self.is_lost = False

    def push(self, deltas: list[TokenDelta]) -> None:
        batch = worker_pb2.TokenBatch(ref=self._ref, name=self._name, deltas=[delta_to_pb(delta) for delta in deltas])
        self._queue.append(batch)
        self._something.set()
        if len(self._queue) > BATCHES_UNACKNOWLEDGED_MAX:
            self._lose("does not acknowledge")

    @property
    def is_delivered(self) -> bool:
        """Everything pushed was acknowledged, or nobody is there to acknowledge it."""
        return not self._queue

    async def run(self) -> None:
        backoff = Backoff()
        while not self.is_lost:
            try:
                if await self._stream(backoff):
                    return
            except grpc.aio.AioRpcError as error:
                log.warning("gateway %s: %s %s", self.address, error.code().name, error.details())
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._lose(f"refuses: {error.details()}")
                    return
            now = asyncio.get_running_loop().time()
            self._away_since = now if self._away_since is None else self._away_since
            if now - self._away_since >= self._lease_s:
                self._lose("cannot be reached")
            else:
                await asyncio.sleep(backoff.next_s())

    async def _stream(self, backoff: Backoff) -> bool:
        """One stream until it breaks; True when it was closed for being idle."""
        self._sent = self._acknowledged = 0
        self._something.set()
        idle = asyncio.Event()
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.TokenLinkStub(channel)
            push = partial(stub.Push, metadata=((METADATA_KEY, str(WIRE_VERSION)),))
            async with aclosing(converse(push, self._outgoing(idle))) as acks:
                async for ack in acks:
                    backoff.reset()
                    self._away_since = None
                    self._on_ack(ack)
        return idle.is_set() and not self._queue

    def _on_ack(self, ack: worker_pb2.TokenAck) -> None:
        """`batches` counts what this stream has delivered so far."""
        while self._acknowledged < ack.batches and self._sent:
            self._queue.popleft()
            self._sent -= 1
            self._acknowledged += 1
        for message in ack.cancels:
            cancel = cancel_from_pb(message)
            self._post(CancelRequested(AttemptRef(cancel.request_id, cancel.attempt), cancel.reason))

    async def _outgoing(self, idle: asyncio.Event) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        while not self.is_lost:
            while self._sent < len(self._queue):
                batch = self._queue[self._sent]
                self._sent += 1
                yield batch
            self._something.clear()
            try:
                await asyncio.wait_for(self._something.wait(), IDLE_S_MAX)
            except TimeoutError:
                if not self._queue:
                    idle.set()
                    return

    def _lose(self, why: str) -> None:
        if self.is_lost:
            return
        log.error("gateway %s %s: its requests are cancelled", self.address, why)
        self.is_lost = True
        self._queue.clear()
        self._sent = 0
        self._something.set()
        self._post(GatewayLost(self.address))


class TokenStreams:
    """Links by gateway address, opened by the first token and dropped when they end."""

    def __init__(self, ref: InstanceRef, name: str, lease_s: float, post: Callable[[Event], None]) -> None:
        self._ref = ref
        self._name = name
        self._lease_s = lease_s
        self._post = post
        self._links: dict[str, GatewayLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_delivered(self) -> bool:
        return all(link.is_delivered for link in self._links.values())

    def push(self, gateway: str, deltas: list[TokenDelta]) -> None:
        link = self._links.get(gateway)
        if link is None or link.is_lost:
            link = GatewayLink(gateway, self._ref, self._name, self._lease_s, self._post)
            self._links[gateway] = link
            task = asyncio.create_task(self._run(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link.push(deltas)

    async def _run(self, link: GatewayLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
