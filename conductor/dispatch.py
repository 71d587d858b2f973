"""Carrying out decisions: assignments and cancels to workers, news to the gateway that owns the request.

A decision for an instance whose stream is already gone is dropped: its loss is in the inbox and ends the attempt. So
is one about a request that its gateway ended meanwhile: the end is in the inbox and brings the cancel. Only a cancel is
kept: the attempt is over here, nothing will bring it again, and the instance may merely have lost its connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from conductor.core.decisions import (
    AttemptFailed,
    CancelAttempt,
    Decision,
    Drain,
    HandoffComplete,
    Reject,
    Resync,
    Route,
    request_error,
)
from conductor.core.fleet import Fleet
from conductor.ports import GatewayPort, Placement, RoutedRequest
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import Assign, Peer
from segue.worker_messages import CancelAttempt as CancelMessage

log = logging.getLogger(__name__)

AWAY_INSTANCES_MAX = 64
CANCELS_KEPT_MAX = 4096
"""Undelivered cancels of one instance: more attempts than it can run. Past either maximum the oldest go; what they
would have ended is ended by leases, or by the gateway when tokens of it arrive."""


class WorkerLink(Protocol):
    """The control stream to one instance. Calls never block; one that cannot keep up closes its stream."""

    def assign(self, assign: Assign) -> None: ...

    def cancel(self, cancel: CancelMessage) -> None: ...

    def resync(self, sequence_seen: int) -> None: ...

    def drain(self) -> None: ...


class LiveRequest(msgspec.Struct):
    """A request between submit and its end. `routed` is dropped once the workers have it."""

    attempt: int
    gateway: GatewayPort
    routed: RoutedRequest | None
    submitted_us: int


class Dispatcher:
    """`links` are the control streams of members, `live` the requests that gateways have not ended. `give_up` ends a
    request whose gateway failed on its own callback."""

    def __init__(self, fleet: Fleet, clock_us: Callable[[], int], give_up: Callable[[str, str], None]) -> None:
        self.links: dict[InstanceRef, WorkerLink] = {}
        self.live: dict[str, LiveRequest] = {}
        self._fleet = fleet
        self._clock_us = clock_us
        self._give_up = give_up
        self._undelivered: dict[InstanceRef, deque[CancelMessage]] = {}

    def connect(self, ref: InstanceRef, link: WorkerLink) -> None:
        """A control stream to `ref` begins; it is told first what it missed."""
        self.links[ref] = link
        for cancel in self._undelivered.pop(ref, ()):
            link.cancel(cancel)

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Route():
                self._assign(decision)
            case Reject():
                error = request_error(decision)
                self._tell(
                    decision.key, lambda gateway, id_, attempt: gateway.on_rejected(id_, attempt, error), ends=True
                )
            case AttemptFailed():
                reason = decision.reason
                log.warning("request %s attempt %d failed: %s", decision.key.request_id, decision.key.attempt, reason)
                self._tell(
                    decision.key,
                    lambda gateway, id_, attempt: gateway.on_attempt_failed(id_, attempt, reason),
                    ends=True,
                )
            case HandoffComplete():
                self._tell(decision.key, lambda gateway, id_, attempt: gateway.on_handoff_complete(id_, attempt))
            case CancelAttempt():
                self._cancel(decision)
            case Resync():
                link = self._link(decision.ref)
                if link is not None:
                    link.resync(decision.sequence_seen)
            case Drain():
                link = self._link(decision.ref)
                if link is not None:
                    link.drain()

    def _cancel(self, decision: CancelAttempt) -> None:
        link = self._link(decision.ref)
        if link is not None:
            link.cancel(_cancel(decision))
            return
        if decision.ref not in self._undelivered and len(self._undelivered) >= AWAY_INSTANCES_MAX:
            del self._undelivered[next(iter(self._undelivered))]
        self._undelivered.setdefault(decision.ref, deque(maxlen=CANCELS_KEPT_MAX)).append(_cancel(decision))

    def _assign(self, route: Route) -> None:
        """Both sides get the same message. A request that its gateway ended meanwhile gets its cancel next."""
        live = self.live.get(route.key.request_id)
        if live is None or live.attempt != route.key.attempt or live.routed is None:
            return
        assign = self._assignment(live.routed, route, live.submitted_us)
        live.routed = None
        for ref in (route.decode, route.prefill):
            link = self._link(ref)
            if link is not None:
                link.assign(assign)
        placement = Placement(
            prefill="" if assign.prefill is None else assign.prefill.name,
            decode="" if assign.decode is None else assign.decode.name,
        )
        self._tell(route.key, lambda gateway, id_, attempt: gateway.on_placed(id_, attempt, placement))

    def _assignment(self, request: RoutedRequest, route: Route, submitted_us: int) -> Assign:
        left_ms = request.deadline_ms - (self._clock_us() - submitted_us) // 1000
        return Assign(
            request_id=request.request_id,
            attempt=request.attempt,
            gateway=request.gateway,
            token_ids=request.token_ids,
            tokens_prompt=request.tokens_prompt,
            sampling=request.sampling,
            prefill=self._peer(route.prefill),
            decode=self._peer(route.decode),
            hash_root=request.hash_root,
            deadline_ms=max(left_ms, 1) if request.deadline_ms else 0,
        )

    def _peer(self, ref: InstanceRef | None) -> Peer | None:
        instance = self._fleet.find(ref)
        if instance is None:
            return None
        manifest = instance.manifest
        return Peer(ref=manifest.ref, name=manifest.name, control_address=manifest.control_address)

    def _tell(self, key: AttemptRef, call: Callable[[GatewayPort, str, int], None], *, ends: bool = False) -> None:
        """Call the gateway of the attempt, unless it ended it or moved on."""
        live = self.live.get(key.request_id)
        if live is None or live.attempt != key.attempt:
            return
        if ends:
            del self.live[key.request_id]
        try:
            call(live.gateway, key.request_id, key.attempt)
        except Exception:
            # A gateway that fails on one request must not take the Conductor, and with it all others, down.
            log.exception("gateway failed on request %s attempt %d", key.request_id, key.attempt)
            self._give_up(key.request_id, "error")

    def _link(self, ref: InstanceRef | None) -> WorkerLink | None:
        return None if ref is None else self.links.get(ref)


def _cancel(decision: CancelAttempt) -> CancelMessage:
    return CancelMessage(request_id=decision.key.request_id, attempt=decision.key.attempt, reason=decision.reason)
