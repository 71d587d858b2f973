"""The edge of one simulated Conductor: as `conductor.dispatch`, but in virtual time."""

from __future__ import annotations

from time import perf_counter_ns

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
from conductor.core.events import Event, RequestFinished, Tick
from conductor.core.machine import ConductorCore
from segue.block_hash import block_hashes
from segue.errors import Overloaded
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import Assign, Peer
from simulator.event_heap import Rank
from simulator.parts import FrontPort, Parts
from simulator.policies import Fetch, PolicyNotes
from worker_runtime import events as ev


class Conductor:
    """One Conductor and the front whose requests it places. A decision takes no virtual time."""

    def __init__(
        self, name: str, core: ConductorCore, parts: Parts, notes: PolicyNotes | None = None, *, checked: bool = False
    ) -> None:
        self.name = name
        self.core = core
        self._notes = notes or PolicyNotes()
        self.front: FrontPort | None = None
        self.step_ns: list[int] = []
        """Real time of each step that placed something: cost of a decision."""
        self._parts = parts
        self._checked = checked
        self._inbox: list[Event] = []
        self._stepping = False
        self._wakeup_us: int | None = None

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        if not self._stepping:
            self._stepping = True
            self._parts.heap.push(self._parts.heap.now_us, Rank.CONDUCTOR, self._step)

    def finish(self, request_id: str, reason: str) -> None:
        self.post(RequestFinished(request_id=request_id, reason=reason))

    def _step(self) -> None:
        self._stepping = False
        events, self._inbox = self._inbox, []
        started_ns = perf_counter_ns()
        decisions = self.core.step(self._parts.heap.now_us, events or [Tick()])
        if any(isinstance(decision, Route) for decision in decisions):
            self.step_ns.append(perf_counter_ns() - started_ns)
        for decision in decisions:
            self._carry_out(decision)
        if self._checked:
            self.core.check()
        self._plan_wakeup()

    def _plan_wakeup(self) -> None:
        wakeup_us = self.core.next_wakeup()
        if wakeup_us is None:
            return
        wakeup_us = max(wakeup_us, self._parts.heap.now_us)
        if self._wakeup_us is None or wakeup_us < self._wakeup_us:
            self._wakeup_us = wakeup_us
            self._parts.heap.push(wakeup_us, Rank.TIMER, lambda: self._wake(wakeup_us))

    def _wake(self, planned_us: int) -> None:
        if self._wakeup_us != planned_us:
            return
        self._wakeup_us = None
        wanted_us = self.core.next_wakeup()
        if wanted_us is not None and wanted_us <= self._parts.heap.now_us:
            self._step()
        else:
            self._plan_wakeup()

    def _carry_out(self, decision: Decision) -> None:
        front = self.front
        assert front is not None, "a Conductor has a front before it steps"
        match decision:
            case Route():
                self._assign(decision, front)
            case Reject():
                front.on_rejected(decision.key, request_error(decision))
            case AttemptFailed(key=key, reason=reason):
                front.on_attempt_failed(key, reason)
            case HandoffComplete(key=key):
                front.on_handoff_complete(key)
                self._ask_at_landing(key, front)
            case CancelAttempt(ref=ref, key=key, reason=reason):
                self._tell(ref, ev.CancelRequested(key, reason))
            case Drain(ref=ref):
                self._tell(ref, ev.Drain())
            case Resync(ref=ref, sequence_seen=seen):
                self._ask_again(ref, seen)

    def _ask_at_landing(self, key: AttemptRef, front: FrontPort) -> None:
        reason = self._notes.at_landing(key) if self._notes.at_landing is not None else ""
        if reason:
            front.on_rejected(key, Overloaded(reason, resource="decode", retry_after_ms=1_000))
            self.finish(key.request_id, reason)

    def _assign(self, route: Route, front: FrontPort) -> None:
        prefill, decode = self._peer(route.prefill), self._peer(route.decode)
        assert decode is not None, "the core routes to members"
        assign = front.assignment(route.key, prefill, decode)
        if assign is None:
            return
        fetch = self._notes.fetches.pop(route.key, None) or self._fetch_of(route)
        for ref in (route.decode, route.prefill):
            if ref is not None and fetch is not None and ref.uuid == fetch.target:
                self._tell_after_fetch(ref, fetch, assign)
            elif ref is not None:
                self._tell(ref, ev.Assigned(assign, self.name))
        front.on_placed(route.key, prefill.name if prefill else "", decode.name)

    def _fetch_of(self, route: Route) -> Fetch | None:
        if route.source is None:
            return None
        target = route.prefill or route.decode
        block_size = self.core.fleet.instances[target.uuid].block_size
        return Fetch(route.source.uuid, target.uuid, route.tokens_cached_expected // block_size)

    def _tell(self, ref: InstanceRef, event: ev.Event) -> None:
        parts = self._parts

        def deliver() -> None:
            worker = parts.worker(ref)
            if worker is not None:
                worker.post(event)

        parts.network.stream(self.name, ref.uuid, deliver)

    def _tell_after_fetch(self, ref: InstanceRef, fetch: Fetch, assign: Assign) -> None:
        """The prefix is copied before the prefill instance hears of the request."""
        parts = self._parts
        size = self.core.fleet.instances[ref.uuid].block_size
        hashes = block_hashes(assign.hash_root, assign.token_ids[: fetch.blocks * size * 4], size)

        def deliver() -> None:
            worker = parts.worker(ref)
            if worker is not None:
                worker.fetch(fetch.source, hashes, lambda: worker.post(ev.Assigned(assign, self.name)))

        parts.network.stream(self.name, ref.uuid, deliver)

    def _ask_again(self, ref: InstanceRef, sequence_seen: int) -> None:
        parts = self._parts

        def deliver() -> None:
            worker = parts.worker(ref)
            if worker is not None:
                worker.resync(sequence_seen)

        parts.network.stream(self.name, ref.uuid, deliver)

    def _peer(self, ref: InstanceRef | None) -> Peer | None:
        instance = self.core.fleet.find(ref)
        if instance is None:
            return None
        manifest = instance.manifest
        return Peer(ref=manifest.ref, name=manifest.name, control_address=manifest.control_address)
