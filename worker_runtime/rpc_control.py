"""The worker's streams to the Conductors: it dials each of them, registers, and keeps one stream to each.

Assignments, cancels and resync requests come in; outcomes and heartbeats go out. A broken stream is dialled again with
back-off and registers anew. Outcomes are kept until the Conductor has taken them, and said again on the next stream (it
ignores what it knows); after them the worker says which attempts it still has, so that both sides learn what the break
has swallowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
import msgspec
from segue_proto.convert import assign_from_pb, cancel_from_pb, outcome_to_pb
from segue_proto.v1 import worker_pb2, worker_pb2_grpc

from segue.ids import AttemptRef
from segue.limits import GRPC_MESSAGE_BYTES_MAX
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard
from segue.worker_messages import Outcome
from worker_runtime.backoff import Backoff
from worker_runtime.events import Assigned, CancelRequested, Event, GatewayLost
from worker_runtime.rpc_stream import converse

log = logging.getLogger(__name__)

OUTCOMES_KEPT_MAX = 65_536
"""Per Conductor while it is away: ten seconds of a busy instance; older ones it learns from its own time-outs."""

HEARTBEAT_S_DEFAULT = 1.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class ConductorLink:
    """One Conductor. `post` takes events for the core, `resync` a sequence to replay from; `on_registered` is called
    after every registration with the Conductor's name and address, `on_refused` with its address and reason when it
    will not have this instance, `on_drain` when it wants the instance to leave."""

    def __init__(
        self,
        address: str,
        manifest: InstanceManifest,
        card: ModelCard,
        *,
        post: Callable[[Event], None],
        resync: Callable[[int], None],
        on_registered: Callable[[str, str], None],
        on_refused: Callable[[str, str], None],
        steps: Callable[[], int],
        is_draining: Callable[[], bool],
        on_drain: Callable[[], None],
        live: Callable[[], list[AttemptRef]],
    ) -> None:
        self.address = address
        self._manifest = msgspec.msgpack.encode(manifest)
        self._card = card
        self._post = post
        self._resync = resync
        self._on_registered = on_registered
        self._on_refused = on_refused
        self._steps = steps
        self._is_draining = is_draining
        self._on_drain = on_drain
        self._live = live
        self._outcomes: deque[Outcome] = deque()
        """Not taken yet; the first `_sent` of them are on the present stream."""
        self._sent = 0
        self._taken = 0
        self.identity = ""
        """Of the Conductor process that registered this instance last."""
        self._gateways: set[str] = set()
        """Gateways of that Conductor's requests."""
        self._something = asyncio.Event()
        self._registered = False
        self._card_wanted = False
        self._drain_told = False
        self._heartbeat_s = HEARTBEAT_S_DEFAULT
        self._beat_at = 0.0

    def report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if len(self._outcomes) > OUTCOMES_KEPT_MAX:
            self._outcomes.popleft()
            self._sent = max(self._sent - 1, 0)
        self._something.set()

    def nudge(self) -> None:
        """Something about this instance has changed: say it now."""
        self._something.set()

    @property
    def is_registered(self) -> bool:
        """Whether the stream stands."""
        return self._registered

    def forget(self) -> None:
        """The Conductor process has ended: nobody wants its requests any more."""
        for gateway in sorted(self._gateways):
            self._post(GatewayLost(gateway))
        self._gateways.clear()
        self._outcomes.clear()
        self._sent = 0
        self.identity = ""

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff()
        while True:
            try:
                await self._attach(backoff)
            except grpc.aio.AioRpcError as error:
                log.warning("conductor %s: %s %s", self.address, error.code().name, error.details())
            await asyncio.sleep(backoff.next_s())

    async def _attach(self, backoff: Backoff) -> None:
        self._card_wanted = self._drain_told = False
        try:
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                stub = worker_pb2_grpc.WorkerControlStub(channel)
                async with aclosing(converse(stub.Attach, self._outgoing())) as stream:
                    async for message in stream:
                        if self._on_message(message):
                            backoff.reset()
        finally:
            self._registered = False

    def _on_message(self, message: worker_pb2.ConductorMessage) -> bool:
        """True when the message says that this instance is registered."""
        kind = message.WhichOneof("body")
        if kind == "assign":
            self._gateways.add(message.assign.gateway)
            self._post(Assigned(assign_from_pb(message.assign), self.address))
        elif kind == "cancel":
            cancel = cancel_from_pb(message.cancel)
            self._post(CancelRequested(AttemptRef(cancel.request_id, cancel.attempt), cancel.reason))
        elif kind == "resync":
            self._resync(message.resync.sequence_seen)
        elif kind == "drain":
            self._on_drain()
        elif kind == "taken":
            self._on_taken(message.taken.outcomes)
        elif kind == "refused":
            self._on_refused(self.address, message.refused.reason)
        elif kind == "registered":
            self._accept(message.registered)
        return bool(kind == "registered")

    def _on_taken(self, outcomes: int) -> None:
        while self._taken < outcomes and self._sent:
            self._outcomes.popleft()
            self._sent -= 1
            self._taken += 1

    def _accept(self, message: worker_pb2.Registered) -> None:
        if self.identity not in ("", message.conductor):
            log.warning("conductor %s was started again: what the last one asked for is let go", self.address)
            self.forget()
        self.identity = message.conductor
        self._registered = True
        self._card_wanted = message.need_card
        self._heartbeat_s = message.heartbeat_ms / 1000 or HEARTBEAT_S_DEFAULT
        self._something.set()
        self._on_registered(message.conductor or self.address, self.address)

    async def _outgoing(self) -> AsyncGenerator[worker_pb2.WorkerMessage, None]:
        self._sent = self._taken = 0
        live_said = False
        yield worker_pb2.WorkerMessage(register=worker_pb2.Register(manifest=self._manifest))
        while True:
            idle = not await self._wait_for_something()
            if not self._registered:
                continue
            if self._card_wanted:
                self._card_wanted = False
                card = msgspec.msgpack.encode(self._card)
                yield worker_pb2.WorkerMessage(card=worker_pb2.ModelCardAsset(digest=self._card.digest, card=card))
            drains = self._is_draining() and not self._drain_told
            if drains or idle:
                # Before the failures that a stopping instance reports: they must not be planned onto it again.
                self._drain_told = self._is_draining()
                beat = worker_pb2.WorkerHeartbeat(steps=self._steps(), draining=self._drain_told)
                yield worker_pb2.WorkerMessage(heartbeat=beat)
            while self._sent < len(self._outcomes):
                outcome = self._outcomes[self._sent]
                self._sent += 1
                yield worker_pb2.WorkerMessage(outcome=outcome_to_pb(outcome))
            if not live_said:
                live_said = True
                attempts = [
                    worker_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt) for key in self._live()
                ]
                yield worker_pb2.WorkerMessage(live=worker_pb2.LiveAttempts(attempts=attempts))

    async def _wait_for_something(self) -> bool:
        """False when a heartbeat is due: at the latest every half of what the Conductor expects."""
        due_s = self._beat_at - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._something.wait(), max(0.0, due_s))
        except TimeoutError:
            self._beat_at = asyncio.get_running_loop().time() + self._heartbeat_s / 2
            return False
        self._something.clear()
        return True
