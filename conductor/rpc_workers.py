"""WorkerControl: one bidirectional stream to each worker.

    worker    -> Register, [ModelCardAsset], Outcome*, LiveAttempts, (Outcome | WorkerHeartbeat)*
    Conductor -> Registered | Refused, (Assign | CancelAttempt | ResyncEvents | Drain | OutcomesTaken)*

A worker is a member from its Register (and card, where asked for) until it is silent for three heartbeats, a newer
incarnation registers, or its stream ends. One that leaves says first that it drains; where the stream ends without that
word the worker is away and stays a member for AWAY_S, so that a cut connection does not cost its requests a new plan,
unless whoever started it says that its process has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError
from segue_proto.convert import assign_to_pb, cancel_to_pb, outcome_from_pb
from segue_proto.v1 import worker_pb2

from conductor.control_loop import ControlLoop, monotonic_us
from conductor.registry import HEARTBEAT_MS, HEARTBEATS_MISSED_MAX, Registry
from conductor.rpc_version import MY_VERSION
from kvstore.events_zmq import UnreachableEvents
from segue.errors import SegueError
from segue.ids import AttemptRef, InstanceRef
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard
from segue.wire_version import VersionClaim, wire_refusal
from segue.worker_messages import Assign, CancelAttempt

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerControl"].full_name

OUTGOING_MAX = 4096
"""Messages a worker has not read yet; a worker further behind is as good as lost."""

OUTCOMES_PER_ACK_MAX = 256
"""Acknowledged with every heartbeat, and in a burst after so many."""

REGISTER_S_MAX = 10.0
"""A stream that does not say who it is (or does not send the card it was asked for) in this time is closed."""


AWAY_S = 1.0
"""A worker whose connection was cut dials again after 50 ms, 100 ms, 200 ms ...; what is not back by then is lost."""

BROKE = "its control stream broke"

REGISTERED_AGAIN = "it registered again"
PROCESS_ENDED = "its process has ended"


class ProtocolBroken(SegueError):
    """The peer sent what this stream does not allow."""


class Session:
    """One stream. `WorkerLink` of the control loop; its calls only queue."""

    def __init__(self) -> None:
        self.manifest: InstanceManifest | None = None
        self.closed_because = ""
        self._outcomes_taken = 0
        self._outcomes_told = 0
        self._outgoing: asyncio.Queue[worker_pb2.ConductorMessage | None] = asyncio.Queue()

    def assign(self, assign: Assign) -> None:
        self.send(worker_pb2.ConductorMessage(assign=assign_to_pb(assign)))

    def cancel(self, cancel: CancelAttempt) -> None:
        self.send(worker_pb2.ConductorMessage(cancel=cancel_to_pb(cancel)))

    def resync(self, sequence_seen: int) -> None:
        self.send(worker_pb2.ConductorMessage(resync=worker_pb2.ResyncEvents(sequence_seen=sequence_seen)))

    def drain(self) -> None:
        self.send(worker_pb2.ConductorMessage(drain=worker_pb2.Drain()))

    def took_outcome(self) -> None:
        self._outcomes_taken += 1
        if self._outcomes_taken - self._outcomes_told >= OUTCOMES_PER_ACK_MAX:
            self.acknowledge()

    def acknowledge(self) -> None:
        """The worker may forget the outcomes that were taken."""
        if self._outcomes_taken > self._outcomes_told:
            self._outcomes_told = self._outcomes_taken
            taken = worker_pb2.OutcomesTaken(outcomes=self._outcomes_taken)
            self.send(worker_pb2.ConductorMessage(taken=taken))

    def refuse(self, reason: str) -> None:
        self.send(worker_pb2.ConductorMessage(refused=worker_pb2.Refused(reason=reason)))
        self.close(reason)

    def send(self, message: worker_pb2.ConductorMessage) -> None:
        if self.closed_because:
            return
        if self._outgoing.qsize() >= OUTGOING_MAX:
            self.close(f"{OUTGOING_MAX} messages were not read")
        else:
            self._outgoing.put_nowait(message)

    def close(self, reason: str) -> None:
        """End the stream after what is queued. The first reason stays."""
        if not self.closed_because:
            self.closed_because = reason
            self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[worker_pb2.ConductorMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message


class WorkerControlService:
    """`name` identifies this Conductor to its workers."""

    def __init__(self, loop: ControlLoop, registry: Registry, name: str) -> None:
        self._loop = loop
        self._registry = registry
        self._name = name
        self._sessions: dict[InstanceRef, Session] = {}
        self._draining: set[InstanceRef] = set()
        self._away: dict[InstanceRef, asyncio.TimerHandle] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        attach = grpc.stream_stream_rpc_method_handler(
            self.attach,
            response_serializer=worker_pb2.ConductorMessage.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Attach": attach})

    async def attach(
        self,
        request_iterator: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[worker_pb2.WorkerMessage, worker_pb2.ConductorMessage],
    ) -> AsyncIterator[worker_pb2.ConductorMessage]:
        session = Session()
        reader = asyncio.create_task(self._read(session, _parsed(request_iterator)), name="worker stream")
        try:
            async for message in session.outgoing():
                yield message
        finally:
            reader.cancel()
            if session.closed_because in ("", BROKE):
                self._part(session)
            else:
                self._leave(session, session.closed_because)

    async def watch_heartbeats(self) -> None:
        """Until cancelled: close the streams of silent workers. Time in which this process itself stood still proves
        nothing: what the workers said meanwhile is still unread."""
        looked_us = monotonic_us()
        while True:
            await asyncio.sleep(HEARTBEAT_MS / 1000)
            now_us = monotonic_us()
            late_us = now_us - looked_us - HEARTBEAT_MS * 1000
            if late_us > HEARTBEAT_MS * 1000:
                self._registry.excuse(late_us, now_us)
            looked_us = now_us
            for ref in self._registry.silent(now_us):
                reason = f"it was silent for {HEARTBEATS_MISSED_MAX} heartbeats"
                session = self._sessions[ref]
                session.close(reason)
                self._leave(session, reason)

    def ended(self, uuid: str, pid: int) -> None:
        """Its process is no more, says who started it: its stream need not be waited for."""
        ref = self._registry.present(uuid)
        session = None if ref is None else self._sessions.get(ref)
        if session is not None and session.manifest is not None and session.manifest.pid == pid:
            session.close(PROCESS_ENDED)
            self._leave(session, PROCESS_ENDED)

    async def wait_empty(self, seconds_max: float) -> None:
        """Until no worker is left, or for so long."""
        deadline_us = monotonic_us() + int(seconds_max * 1e6)
        while self._sessions and monotonic_us() < deadline_us:
            await asyncio.sleep(0.02)

    def close(self, reason: str) -> None:
        """End every stream: the Conductor shuts down."""
        for session in list(self._sessions.values()):
            session.close(reason)

    async def _read(self, session: Session, messages: AsyncIterator[worker_pb2.WorkerMessage]) -> None:
        """Everything the worker says. Ends the session when it is refused, says nonsense or hangs up."""
        try:
            async with asyncio.timeout(REGISTER_S_MAX):
                manifest = await self._introduce(session, messages)
            self._join(session, manifest)
            async for message in messages:
                self._take(session, manifest.ref, message)
            session.close(BROKE)
        except TimeoutError:
            session.refuse(f"no registration within {REGISTER_S_MAX:.0f} s")
        except (ProtocolBroken, UnreachableEvents) as error:
            log.warning("refused a worker: %s", error)
            session.refuse(str(error))
        except Exception:
            log.exception("the stream of a worker failed")
            session.close("the Conductor failed on its control stream")

    async def _introduce(self, session: Session, messages: AsyncIterator[worker_pb2.WorkerMessage]) -> InstanceManifest:
        """The first message, answered, and the card if it is needed. Raises ProtocolBroken when refused."""
        first = await _next(messages, "register")
        foreign = wire_refusal(MY_VERSION, _decode(first.register.manifest, VersionClaim))
        if foreign is not None:
            raise ProtocolBroken(foreign)
        manifest = _decode(first.register.manifest, InstanceManifest)
        refusal = self._registry.refusal(manifest)
        if refusal is not None:
            raise ProtocolBroken(refusal)
        need_card = self._registry.needs_card(manifest)
        answer = worker_pb2.Registered(need_card=need_card, heartbeat_ms=HEARTBEAT_MS, conductor=self._name)
        session.send(worker_pb2.ConductorMessage(registered=answer))
        if need_card:
            asset = (await _next(messages, "card")).card
            card = _decode(asset.card, ModelCard)
            if not card.digest == asset.digest == manifest.card_digest:
                raise ProtocolBroken(f"the card is {card.digest}, the manifest names {manifest.card_digest}")
            self._registry.add_card(card)
        return manifest

    def _join(self, session: Session, manifest: InstanceManifest) -> None:
        refusal = self._registry.refusal(manifest)
        if refusal is not None:
            raise ProtocolBroken(refusal)
        present = self._registry.present(manifest.ref.uuid)
        if present is not None and present != manifest.ref:
            self._sessions[present].close(REGISTERED_AGAIN)
            self._leave(self._sessions[present], REGISTERED_AGAIN)
        session.manifest = manifest
        known = self._sessions.get(manifest.ref)
        self._sessions[manifest.ref] = session
        self._registry.add(manifest, monotonic_us())
        if known is None:
            self._loop.joined(manifest, session)
            log.info("%s %s joined for model %s", manifest.role, manifest.name, manifest.model)
        else:
            known.close(REGISTERED_AGAIN)
            self._await_no_longer(manifest.ref)
            self._loop.returned(manifest.ref, session)
            log.info("%s %s is back", manifest.role, manifest.name)

    def _take(self, session: Session, ref: InstanceRef, message: worker_pb2.WorkerMessage) -> None:
        self._registry.heard(ref, monotonic_us())
        match message.WhichOneof("body"):
            case "outcome":
                try:
                    self._loop.reported(ref, outcome_from_pb(message.outcome))
                except KeyError as error:
                    raise ProtocolBroken(f"unknown outcome kind {error}") from error
                session.took_outcome()
            case "live":
                session.acknowledge()
                held = [AttemptRef(key.request_id, key.attempt) for key in message.live.attempts]
                self._loop.held(ref, held)
            case "heartbeat":
                session.acknowledge()
                if message.heartbeat.draining and ref not in self._draining:
                    self._draining.add(ref)
                    self._loop.draining(ref)
            case other:
                raise ProtocolBroken(f"{other or 'an empty message'} is not expected after registration")

    def _part(self, session: Session) -> None:
        """The stream broke without a word: the worker may be back in a moment. One that was about to leave has left."""
        manifest = session.manifest
        if manifest is None or self._sessions.get(manifest.ref) is not session:
            return
        if manifest.ref in self._draining:
            self._leave(session, BROKE)
            return
        self._loop.away(manifest.ref, int(AWAY_S * 1e6))
        timer = asyncio.get_running_loop().call_later(AWAY_S, self._leave, session, BROKE)
        self._away[manifest.ref] = timer

    def _await_no_longer(self, ref: InstanceRef) -> None:
        timer = self._away.pop(ref, None)
        if timer is not None:
            timer.cancel()

    def _leave(self, session: Session, reason: str) -> None:
        """Idempotent."""
        manifest = session.manifest
        if manifest is None or self._sessions.get(manifest.ref) is not session:
            return
        self._await_no_longer(manifest.ref)
        del self._sessions[manifest.ref]
        self._draining.discard(manifest.ref)
        self._registry.remove(manifest.ref)
        self._loop.lost(manifest.ref, reason)
        log.warning("%s %s left: %s", manifest.role, manifest.name, reason)


async def _parsed(messages: AsyncIterator[bytes]) -> AsyncIterator[worker_pb2.WorkerMessage]:
    """Raises ProtocolBroken for what is no message: of grpc's own reading only a traceback in the log would be left."""
    async for raw in messages:
        try:
            yield worker_pb2.WorkerMessage.FromString(raw)
        except DecodeError as error:
            raise ProtocolBroken(f"WorkerMessage: {error}") from error


async def _next(messages: AsyncIterator[worker_pb2.WorkerMessage], body: str) -> worker_pb2.WorkerMessage:
    message = await anext(messages, None)
    if message is None or message.WhichOneof("body") != body:
        got = "the end" if message is None else message.WhichOneof("body")
        raise ProtocolBroken(f"expected {body}, got {got}")
    return message


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolBroken(f"{kind.__name__}: {error}") from error
