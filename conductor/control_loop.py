"""The effects around the Conductor core: one task gathers what happened, calls `step` once, carries out the decisions.

Everything runs on one event loop. Callers only append to the inbox, so a gateway may call `submit` and `finish` from
inside of its own callbacks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from conductor.core.decision_log import Explanation
from conductor.core.events import (
    AttemptsHeld,
    DrainRequested,
    Event,
    InstanceAway,
    InstanceDraining,
    InstanceJoined,
    InstanceLost,
    InstanceReturned,
    KvPublished,
    LoadReported,
    OutcomeReported,
    RequestArrived,
    RequestFinished,
    Tick,
)
from conductor.core.machine import ConductorCore
from conductor.dispatch import Dispatcher, LiveRequest, WorkerLink
from conductor.ports import ClusterView, GatewayPort, InstanceView, PredictionView, RoutedRequest, ServedModel
from conductor.recording import Recorder
from conductor.registry import Registry
from segue.errors import DuplicateRequest, Overloaded
from segue.ids import AttemptRef, InstanceRef
from segue.kv_events import KvEventBatch, PublishedMessage
from segue.limits import LIVE_REQUESTS_MAX
from segue.manifest import InstanceManifest
from segue.worker_messages import Outcome

log = logging.getLogger(__name__)

EVENTS_PER_STEP_MAX = 1024
"""Bounds how long one step keeps the event loop."""

KV_MESSAGES_INBOX_MAX = 64
"""Published messages taken from the socket ahead of the core; more wait in the socket, and past its own limit are
dropped there, which the sequence numbers show."""

RETRY_AFTER_MS_LIVE_MAX = 1000

MEMBERSHIP_EVENTS = (InstanceJoined, InstanceLost, InstanceDraining, DrainRequested, LoadReported)


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class EventSource(Protocol):
    """Where KV events and load reports come from (`kvstore.events_zmq.EventSubscriber`)."""

    def add(self, address: str) -> None: ...

    def remove(self, address: str) -> None: ...

    async def receive(self) -> PublishedMessage: ...


class ControlLoop:
    """Owns the core. Implements `conductor.ports.ConductorPort`."""

    def __init__(
        self,
        core: ConductorCore,
        registry: Registry,
        events: EventSource,
        *,
        clock_us: Callable[[], int] = monotonic_us,
        recorder: Recorder | None = None,
    ) -> None:
        self._core = core
        self._registry = registry
        self._events = events
        self._clock_us = clock_us
        self._recorder = recorder
        self._inbox: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._kv_waiting = 0
        self._kv_room = asyncio.Event()
        self._manifests: dict[InstanceRef, InstanceManifest] = {}
        self._dispatcher = Dispatcher(core.fleet, clock_us, self.finish)
        self._live = self._dispatcher.live
        self._models: dict[str, ServedModel] | None = None
        self._drifts: dict[str, str] = {}
        """Of each model's predictions, as last logged."""

    # -- ConductorPort

    def models(self) -> dict[str, ServedModel]:
        if self._models is None:
            served = [self._served(model) for model in self._core.fleet.models()]
            self._models = {model.card.name: model for model in served if model is not None}
        return self._models

    def submit(self, request: RoutedRequest, gateway: GatewayPort) -> None:
        """Raises DuplicateRequest, or Overloaded when too many requests are live."""
        live = self._live.get(request.request_id)
        if live is not None and request.attempt <= live.attempt:
            raise DuplicateRequest(f"request {request.request_id} is live", field="request_id")
        if live is None and len(self._live) >= LIVE_REQUESTS_MAX:
            message = f"{LIVE_REQUESTS_MAX} requests are live"
            raise Overloaded(message, resource="live requests", retry_after_ms=RETRY_AFTER_MS_LIVE_MAX)
        self._live[request.request_id] = LiveRequest(request.attempt, gateway, request, self._clock_us())
        self._post(_arrival(request))

    def finish(self, request_id: str, reason: str) -> None:
        self._live.pop(request_id, None)
        self._post(RequestFinished(request_id=request_id, reason=reason))

    def cluster(self) -> ClusterView:
        instances = [
            InstanceView(
                manifest=instance.manifest,
                load=instance.load,
                draining=instance.draining,
                booked_requests=instance.booked_rows,
                booked_pages=instance.booked_pages,
                booked_tokens=instance.booked_tokens,
            )
            for instance in self._core.fleet.instances.values()
        ]
        decided = self._core.admission.log
        return ClusterView(
            instances=instances,
            models=list(self.models().values()),
            requests_queued=self._core.requests_queued,
            predictions=[
                PredictionView(coverage=coverage, regrets=decided.regrets(coverage.model, coverage.kind))
                for coverage in self._core.forecast.coverages()
            ],
        )

    def explain(self, request_id: str) -> list[Explanation]:
        return self._core.admission.log.find(request_id)

    def recent_decisions(self, count: int) -> list[tuple[int, Explanation]]:
        now_us = monotonic_us()
        return [(now_us - entry.decided_us, entry) for entry in self._core.admission.log.recent(count)]

    # -- what workers do

    def joined(self, manifest: InstanceManifest, link: WorkerLink) -> None:
        """Raises UnreachableEvents, and then it has not joined."""
        self._events.add(manifest.events_address)
        self._manifests[manifest.ref] = manifest
        self._dispatcher.connect(manifest.ref, link)
        self._post(InstanceJoined(manifest=manifest))

    def lost(self, ref: InstanceRef, reason: str) -> None:
        """Idempotent."""
        manifest = self._manifests.pop(ref, None)
        if manifest is not None:
            self._dispatcher.links.pop(ref, None)
            self._events.remove(manifest.events_address)
            self._post(InstanceLost(ref=ref, reason=reason))

    def away(self, ref: InstanceRef, away_us: int) -> None:
        """Its stream broke and may stand again soon."""
        if self._dispatcher.links.pop(ref, None) is not None:
            self._post(InstanceAway(ref=ref, away_us=away_us))

    def returned(self, ref: InstanceRef, link: WorkerLink) -> None:
        self._dispatcher.connect(ref, link)
        self._post(InstanceReturned(ref=ref))

    def held(self, ref: InstanceRef, attempts: list[AttemptRef]) -> None:
        """What the instance still has of what it was assigned before its present stream."""
        self._post(AttemptsHeld(ref=ref, attempts=attempts))

    def draining(self, ref: InstanceRef) -> None:
        self._post(InstanceDraining(ref=ref))

    def reported(self, ref: InstanceRef, outcome: Outcome) -> None:
        self._post(OutcomeReported(ref=ref, outcome=outcome))

    def drain(self, uuid: str) -> None:
        """An operator's or a scaler's wish."""
        self._post(DrainRequested(uuid=uuid))

    # -- loops

    async def run(self) -> None:
        """Until cancelled. Raises when the core breaks an invariant: a Conductor that lost count must not go on."""
        while True:
            await self._wait()
            events = [self._inbox.popleft() for _ in range(min(len(self._inbox), EVENTS_PER_STEP_MAX))]
            self._kv_waiting -= sum(isinstance(event, KvPublished) for event in events)
            self._kv_room.set()
            self._step(events or [Tick()])

    async def read_events(self) -> None:
        """Until cancelled: KV events and load reports into the inbox, no faster than the core takes them."""
        while True:
            while self._kv_waiting >= KV_MESSAGES_INBOX_MAX:
                self._kv_room.clear()
                await self._kv_room.wait()
            message = await self._events.receive()
            if isinstance(message, KvEventBatch):
                self._kv_waiting += 1
                self._post(KvPublished(batch=message))
            else:
                self._post(LoadReported(report=message))

    async def _wait(self) -> None:
        wakeup_us = self._core.next_wakeup()
        timeout_s = None if wakeup_us is None else max(0, wakeup_us - self._clock_us()) / 1e6
        if self._inbox:
            self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
        # Others on this loop run between two steps, and what they post joins this batch.
        await asyncio.sleep(0)

    def _post(self, event: Event) -> None:
        self._inbox.append(event)
        self._wake.set()

    def _step(self, events: list[Event]) -> None:
        now_us = self._clock_us()
        decisions = self._core.step(now_us, events)
        if self._recorder is not None:
            self._recorder.record(now_us, events, decisions)
        if any(isinstance(event, MEMBERSHIP_EVENTS) for event in events):
            self._models = None
        for decision in decisions:
            self._dispatcher.carry_out(decision)
        self._say_drifts()

    def _say_drifts(self) -> None:
        """The core turns careful by itself where its predictions stop holding; an operator should know why."""
        drifts = self._core.forecast.drifts()
        if drifts == self._drifts:
            return
        for model, drift in drifts.items():
            if drift and drift != self._drifts.get(model, ""):
                log.warning("predictions for %s do not hold as they should (%s): admission is careful", model, drift)
            elif not drift and self._drifts.get(model, ""):
                log.warning("predictions for %s hold again", model)
        self._drifts = drifts

    def _served(self, model: str) -> ServedModel | None:
        group = self._core.fleet.served_group(model)
        if group is None:
            return None
        manifest = group.representative
        card = self._registry.card(manifest.card_digest)
        assert card is not None, "an instance joins with its card"
        active = [member for member in group.members.values() if not member.draining]
        return ServedModel(
            card=card if card.name == model else msgspec.structs.replace(card, name=model),
            kv_root=group.kv_root,
            block_size=manifest.layout.block_size,
            max_model_len=min(member.tokens_capacity for member in active),
        )


def _arrival(request: RoutedRequest) -> RequestArrived:
    return RequestArrived(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        tokens_prompt=request.tokens_prompt,
        tokens_known=len(request.token_ids) // 4,
        tokens_max=request.tokens_prompt + request.sampling.max_tokens,
        hash_root=request.hash_root,
        block_hashes=request.block_hashes,
        kv_root=request.kv_root,
        priority=request.priority,
        tenant=request.tenant,
        deadline_us=request.deadline_ms * 1000,
    )
