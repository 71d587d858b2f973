"""The decode machine: `step(now_us, events) -> decisions`, no clock and no I/O.

Memory first. An attempt with a prefill instance waits BOOKED until P asks; then D reserves every page of the prompt
(its own cached prefix, the rest lent to P) and grants, lets P wait in order of asking, or refuses after half a lease.
When D lacks at most one block it computes the rest itself and P gets EMPTY. So P never holds computed pages that D has
no room for, and neither side waits for the other in a circle.

Lent pages are writable by a remote: they join a block table only after P has said that it writes no more (PrefillDone),
and after a cancel they stay quarantined until P confirms (Abort, AbortAck, DoneAtP, Stale), its process has ended, or
the mover has fenced it off. If more than 5 % of the pool stays quarantined the instance asks to be replaced.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.core.attempt import DecodeAttempt
from decode_worker.core.emission import Emission
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner, SeqUpdate
from segue.block_pool import BlockPool
from segue.errors import RequestError
from segue.handoff import EARLY_MESSAGES_MAX, DecodeEvent, DecodeState, HandoffTiming, Tombstones
from segue.handoff_links import PeerLinks
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import Outcome, OutcomeKind
from worker_runtime.events import (
    Assigned,
    CancelRequested,
    CoreLoad,
    Decision,
    Drain,
    Event,
    Fence,
    Fenced,
    GatewayLost,
    LendPages,
    LinkReady,
    LinkRefused,
    PagesMoved,
    PeerGone,
    PeerMessage,
    PlanFinished,
    PublishKv,
    Report,
    RestartNeeded,
    RunPlan,
    SendPeer,
    Stopping,
)

QUARANTINED_PERCENT_MAX = 5
"""More than this, unproven for a whole lease, is not coming back by itself."""

_LENT = (DecodeState.GRANTED, DecodeState.RECEIVING)
_ENDING = (DecodeState.ABORTING, DecodeState.QUARANTINED)


class DecodeCore:
    def __init__(self, ref: InstanceRef, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming) -> None:
        self.ref = ref
        self._planner = planner
        self._pool = pool
        self._timing = timing
        self._attempts: dict[AttemptRef, DecodeAttempt] = {}
        self._by_seq: dict[int, DecodeAttempt] = {}
        self._asking: OrderedDict[AttemptRef, DecodeAttempt] = OrderedDict()
        """BOOKED attempts whose P waits for pages, in order of asking."""
        self._early: OrderedDict[AttemptRef, tuple[int, wire.GrantRequest]] = OrderedDict()
        self._fences: dict[int, DecodeAttempt] = {}
        self._links = PeerLinks(timing)
        self._tombstones = Tombstones(timing.lease_us)
        self._emission = Emission()
        self._draining = False
        self._restart_asked = False
        self._next_id = 1
        self._now_us = 0
        self._out: list[Decision] = []
        self.stale: Counter[str] = Counter()
        """Messages that no longer mean anything, by kind: answered and counted, never an error."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            Assigned: self._on_assigned,
            CancelRequested: self._on_cancel,
            PeerMessage: self._on_peer_message,
            LinkReady: self._on_link_ready,
            LinkRefused: self._on_link_refused,
            PeerGone: self._on_peer_gone,
            PlanFinished: self._on_plan_finished,
            PagesMoved: self._on_pages_moved,
            Fenced: self._on_fenced,
            GatewayLost: self._on_gateway_lost,
            Drain: self._on_drain,
            Stopping: self._on_stopping,
        }
        self._messages: dict[type, Callable[[DecodeAttempt, Any], None]] = {
            wire.GrantRequest: self._on_grant_request,
            wire.PagesSent: self._on_pages_sent,
            wire.PrefillDone: self._on_prefill_done,
            wire.DoneAtP: self._on_done_at_p,
            wire.Abort: self._on_abort,
            wire.AbortAck: self._on_no_more_writes,
            wire.Stale: self._on_no_more_writes,
        }

    # -- the interface of every machine

    def step(self, now_us: int, events: Sequence[Event]) -> list[Decision]:
        self._now_us = now_us
        self._out = []
        for event in events:
            self._handlers[type(event)](event)
        self._run_timers()
        self._grant_in_order()
        while (plan := self._planner.plan()) is not None:
            self._out.append(RunPlan(plan))
        self._out.extend(self._emission.take())
        if kv_events := self._pool.drain_events():
            self._out.append(PublishKv(kv_events))
        return self._out

    def next_wakeup(self) -> int | None:
        """Leases are coarse: while any attempt involves a peer, a look every repeat interval is enough."""
        timed = self._early or any(
            attempt.state is not DecodeState.RUNNING or attempt.deadline_us is not None
            for attempt in self._attempts.values()
        )
        return self._now_us + self._timing.repeat_us if timed else None

    def load(self) -> CoreLoad:
        counts = self._planner.counts()
        remote = [attempt for attempt in self._attempts.values() if attempt.state is not DecodeState.RUNNING]
        return CoreLoad(
            running=counts.running,
            waiting=counts.waiting + len(remote),
            tokens_queued=counts.tokens_queued,
            tokens_running=counts.tokens_running,
            preemptions=counts.preemptions,
            draining=self._draining,
        )

    def check(self) -> None:
        self._planner.check()

    @property
    def is_idle(self) -> bool:
        return not self._attempts

    def states(self) -> dict[AttemptRef, DecodeState]:
        return {key: attempt.state for key, attempt in self._attempts.items()}

    def lent_pages(self) -> dict[AttemptRef, list[int]]:
        """Pages that a remote may write now."""
        return {
            key: attempt.reservation.pages_new
            for key, attempt in self._attempts.items()
            if attempt.reservation is not None and attempt.state in (*_LENT, *_ENDING)
        }

    # -- assignments and cancels

    def _on_assigned(self, event: Assigned) -> None:
        assign = event.assign
        if assign.key in self._attempts:
            self.stale["assigned twice"] += 1
            return
        refusal = self._refusal(event)
        if refusal is not None:
            kind, reason = refusal
            outcome = Outcome(request_id=assign.request_id, attempt=assign.attempt, kind=kind, reason=reason)
            self._out.append(Report(event.conductor, outcome))
            return
        attempt = DecodeAttempt(
            assign, event.conductor, self._take_id(), self._pool.block_size, self._now_us, self._timing.lease_us
        )
        self._attempts[attempt.key] = attempt
        self._by_seq[attempt.seq] = attempt
        early = self._early.pop(attempt.key, None)
        if attempt.peer is None:
            self._run_locally(attempt)
        elif early is not None and early[1].source == attempt.peer:
            self._on_grant_request(attempt, early[1])

    def _refusal(self, event: Assigned) -> tuple[OutcomeKind, str] | None:
        reason = self._tombstones.reason(event.assign.key, self._now_us)
        if reason is not None:
            return OutcomeKind.CANCELLED, reason
        if self._draining:
            return OutcomeKind.REFUSED, "draining"
        tokens = len(event.assign.token_ids) // 4
        if not 0 < tokens < self._planner.tokens_max:
            return OutcomeKind.REFUSED, f"{tokens} tokens, this instance takes 1 to {self._planner.tokens_max - 1}"
        return None

    def _run_locally(self, attempt: DecodeAttempt) -> None:
        assign = attempt.assign
        try:
            self._planner.add(
                attempt.seq,
                attempt.tokens,
                assign.tokens_prompt,
                assign.sampling,
                assign.hash_root,
                order=attempt.seq,
                hashes=attempt.hashes,
            )
        except RequestError as error:
            self._fail(attempt, OutcomeKind.REFUSED, error.message)
            return
        attempt.handoff.advance(DecodeEvent.LOCAL)

    def _on_cancel(self, event: CancelRequested) -> None:
        self._tombstones.bury(event.key, event.reason, self._now_us)
        for attempt in list(self._attempts.values()):
            same_request = attempt.key.request_id == event.key.request_id
            if same_request and event.key.attempt in (0, attempt.key.attempt):
                self._fail(attempt, OutcomeKind.CANCELLED, event.reason)

    def _on_gateway_lost(self, event: GatewayLost) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.assign.gateway == event.gateway:
                self._fail(attempt, OutcomeKind.CANCELLED, "gateway lost")

    def _on_drain(self, _: Drain) -> None:
        self._draining = True

    def _on_stopping(self, event: Stopping) -> None:
        self._draining = True
        for attempt in list(self._attempts.values()):
            self._fail(attempt, OutcomeKind.FAILED, event.reason)

    # -- links

    def _on_link_ready(self, event: LinkReady) -> None:
        self._links.open(event.peer, self._now_us)
        self._links.mark_ready(event.peer, self._now_us)

    def _on_link_refused(self, event: LinkRefused) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            if attempt.state is DecodeState.BOOKED:
                self._fail(attempt, OutcomeKind.REFUSED, event.reason)

    def _on_peer_gone(self, event: PeerGone) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            self._fail(attempt, OutcomeKind.FAILED, "prefill instance is gone")
            if attempt.state in _ENDING:
                self._free_quarantined(attempt)

    def _of_peer(self, peer: InstanceRef) -> list[DecodeAttempt]:
        """Attempts that still need this prefill instance, or wait for its last write."""
        return [
            attempt
            for attempt in self._attempts.values()
            if attempt.peer == peer and attempt.state is not DecodeState.RUNNING
        ]

    # -- messages of P

    def _on_peer_message(self, event: PeerMessage) -> None:
        message = event.message
        self._links.heard(message.source, self._now_us)
        if isinstance(message, wire.Heartbeat):
            self._on_heartbeat(message)
            return
        attempt = self._attempts.get(message.key)
        handler = self._messages.get(type(message))
        wrong_end = message.target != self.ref or (attempt is not None and message.source != attempt.peer)
        if attempt is None or handler is None or wrong_end:
            self._answer_unknown(message, wrong_end=wrong_end)
            return
        attempt.lease_until_us = self._now_us + self._timing.lease_us
        handler(attempt, message)

    def _answer_unknown(self, message: wire.AttemptMessage, *, wrong_end: bool) -> None:
        end = (message.request_id, message.attempt, self.ref, message.source)
        reason = self._tombstones.reason(message.key, self._now_us)
        if wrong_end:
            reason = f"{message.target} is not here, this is {self.ref}"
        elif isinstance(message, wire.GrantRequest) and reason is None:
            self._early[message.key] = (self._now_us + self._timing.lease_us, message)
            if len(self._early) > EARLY_MESSAGES_MAX:
                self._early.popitem(last=False)
            return
        self.stale[type(message).__name__] += 1
        if isinstance(message, wire.Abort) and not wrong_end:
            self._tombstones.bury(message.key, message.reason, self._now_us)
            self._out.append(SendPeer(wire.AbortAck(*end)))
        elif not isinstance(message, wire.Abort | wire.AbortAck | wire.Stale):
            self._out.append(SendPeer(wire.Stale(*end, reason or "unknown attempt")))

    def _on_heartbeat(self, message: wire.Heartbeat) -> None:
        mentioned = 0
        for key in message.live:
            attempt = self._attempts.get(key)
            if attempt is not None and attempt.peer == message.source:
                attempt.lease_until_us = self._now_us + self._timing.lease_us
                mentioned += 1
        live = [attempt.key for attempt in self._of_peer(message.source)]
        if message.target == self.ref:
            self._out.append(SendPeer(wire.Heartbeat(self.ref, message.source, live)))
        self.stale["Heartbeat entry"] += len(message.live) - mentioned

    def _on_grant_request(self, attempt: DecodeAttempt, _: wire.GrantRequest) -> None:
        if attempt.state is DecodeState.BOOKED:
            if attempt.asked_us is None:
                attempt.asked_us = self._now_us
                self._asking[attempt.key] = attempt
        elif attempt.state is DecodeState.GRANTED and attempt.grant is not None:
            self._out.append(SendPeer(attempt.grant))
        elif attempt.state is DecodeState.RUNNING and attempt.grant is None:
            self._say(attempt, wire.Empty)
        else:
            self.stale["GrantRequest"] += 1

    def _on_pages_sent(self, attempt: DecodeAttempt, _: wire.PagesSent) -> None:
        if attempt.state is DecodeState.GRANTED:
            attempt.handoff.advance(DecodeEvent.FIRST_PAGES)
        elif attempt.state is not DecodeState.RECEIVING:
            self.stale["PagesSent"] += 1

    def _on_prefill_done(self, attempt: DecodeAttempt, message: wire.PrefillDone) -> None:
        """P says this only after every move has ended, so it stands for all PagesSent that were lost on the way."""
        if attempt.state is DecodeState.GRANTED:
            attempt.handoff.advance(DecodeEvent.FIRST_PAGES)
        if attempt.state is DecodeState.RECEIVING:
            attempt.handoff.advance(DecodeEvent.ALL_LANDED)
            self._land(attempt, message)
        elif attempt.state is DecodeState.RUNNING:
            self._say(attempt, wire.Complete)
        elif attempt.state in _ENDING:
            self._free_quarantined(attempt)
        else:
            self.stale["PrefillDone"] += 1

    def _land(self, attempt: DecodeAttempt, message: wire.PrefillDone) -> None:
        """Join the running batch. Where a page failed, the planner computes again from the valid prefix."""
        assert attempt.reservation is not None
        tokens_ready = min(message.blocks_valid * self._pool.block_size, len(attempt.tokens))
        tokens = [*attempt.tokens, message.first_token]
        assign = attempt.assign
        try:
            self._planner.land(
                attempt.seq,
                tokens,
                assign.tokens_prompt,
                assign.sampling,
                assign.hash_root,
                attempt.reservation,
                tokens_ready,
                order=attempt.seq,
                hashes=attempt.hashes,
            )
        except RequestError as error:
            self._fail(attempt, OutcomeKind.REFUSED, error.message)
            return
        attempt.reservation = None
        attempt.position = len(tokens)
        attempt.tokens_generated = 1
        attempt.handoff.advance(DecodeEvent.JOIN)
        self._say(attempt, wire.Complete)
        self._report(attempt, OutcomeKind.HANDOFF_COMPLETE)

    def _on_done_at_p(self, attempt: DecodeAttempt, message: wire.DoneAtP) -> None:
        if attempt.state in (*_LENT, DecodeState.BOOKED):
            self._give_back(attempt)
            self._end(attempt, DecodeEvent.END, f"done at prefill: {message.finish}")
        else:
            self._on_no_more_writes(attempt, message)

    def _on_abort(self, attempt: DecodeAttempt, message: wire.Abort) -> None:
        self._say(attempt, wire.AbortAck)
        self._on_no_more_writes(attempt, message)

    def _on_no_more_writes(self, attempt: DecodeAttempt, message: Any) -> None:
        """P has stopped and nothing of it can land any more."""
        if attempt.state in _ENDING:
            self._free_quarantined(attempt)
        elif attempt.state in (*_LENT, DecodeState.BOOKED):
            reason = getattr(message, "reason", "prefill instance stopped")
            self._give_back(attempt)
            self._report(attempt, OutcomeKind.FAILED, reason)
            self._end(attempt, DecodeEvent.END, reason)
        else:
            self.stale[type(message).__name__] += 1

    # -- lending pages

    def _grant_in_order(self) -> None:
        for attempt in list(self._asking.values()):
            if not self._grant(attempt):
                break

    def _grant(self, attempt: DecodeAttempt) -> bool:
        """False when there is no room now: those who asked later wait behind."""
        size, tokens = self._pool.block_size, len(attempt.tokens)
        cached = self._pool.match(attempt.hashes)
        if tokens - len(cached) * size <= size:
            del self._asking[attempt.key]
            self._say(attempt, wire.Empty)
            self._report(attempt, OutcomeKind.EMPTY)
            self._run_locally(attempt)
            return True
        reservation = self._planner.reserve(attempt.seq, tokens, attempt.hashes)
        if reservation is None:
            return False
        del self._asking[attempt.key]
        peer = attempt.peer
        assert peer is not None
        attempt.reservation = reservation
        attempt.grant = wire.Grant(
            *(attempt.key.request_id, attempt.key.attempt, self.ref, peer),
            pages=reservation.pages_new,
            first_block=len(reservation.pages_cached),
            lease_us=self._timing.lease_us,
        )
        attempt.lease_until_us = self._now_us + self._timing.lease_us
        attempt.handoff.advance(DecodeEvent.GRANT)
        self._out.append(LendPages(peer, reservation.pages_new))
        self._out.append(SendPeer(attempt.grant))
        self._report(attempt, OutcomeKind.GRANTED, tokens_cached=len(reservation.pages_cached) * size)
        return True

    def _give_back(self, attempt: DecodeAttempt) -> None:
        """Return reserved pages that nobody can write any more."""
        if attempt.reservation is not None:
            self._planner.reservation_abort(attempt.reservation, quarantine=False)
            attempt.reservation = None

    def _free_quarantined(self, attempt: DecodeAttempt) -> None:
        assert attempt.reservation is not None
        self._pool.unquarantine(attempt.reservation.pages_new)
        attempt.reservation = None
        self._end(attempt, DecodeEvent.FENCED, attempt.ended_reason)

    # -- ends

    def _fail(self, attempt: DecodeAttempt, kind: OutcomeKind, reason: str) -> None:
        """End an attempt in any live state; pages that P may still write are quarantined."""
        if attempt.state in _ENDING:
            return
        self._report(attempt, kind, reason)
        if attempt.state in _LENT:
            assert attempt.reservation is not None
            self._planner.reservation_abort(attempt.reservation, quarantine=True)
            attempt.handoff.advance(DecodeEvent.ABORT)
            attempt.ended_reason = reason
            attempt.lease_until_us = self._now_us + self._timing.lease_us
            self._say(attempt, wire.Abort, reason)
            return
        if attempt.state is DecodeState.RUNNING:
            self._planner.cancel(attempt.seq)
        self._give_back(attempt)
        self._end(attempt, DecodeEvent.END, reason)

    def _end(self, attempt: DecodeAttempt, event: DecodeEvent, reason: str) -> None:
        attempt.handoff.advance(event)
        self._asking.pop(attempt.key, None)
        self._tombstones.bury(attempt.key, reason, self._now_us)
        del self._attempts[attempt.key]
        del self._by_seq[attempt.seq]

    # -- running

    def _on_plan_finished(self, event: PlanFinished) -> None:
        for update in self._planner.finished(event.result):
            attempt = self._by_seq.get(update.seq)
            if attempt is None:
                self.stale["plan result"] += 1
            elif update.tokens or update.finish:
                self._apply_update(attempt, update)

    def _apply_update(self, attempt: DecodeAttempt, update: SeqUpdate) -> None:
        self._emission.add(attempt, update)
        attempt.position += len(update.tokens)
        attempt.tokens_generated += len(update.tokens)
        if update.finish:
            self._report(attempt, OutcomeKind.FINISHED, update.finish, tokens_cached=update.tokens_cached)
            self._planner.release(attempt.seq)
            self._end(attempt, DecodeEvent.END, update.finish)

    # -- time

    def _run_timers(self) -> None:
        for peer in self._links.take_due_beats(self._now_us):
            live = [attempt.key for attempt in self._of_peer(peer)]
            if live:
                self._out.append(SendPeer(wire.Heartbeat(self.ref, peer, live)))
        while self._early and next(iter(self._early.values()))[0] <= self._now_us:
            self._early.popitem(last=False)
        for attempt in list(self._attempts.values()):
            if attempt.state in _ENDING:
                self._chase(attempt)
            elif attempt.deadline_us is not None and self._now_us >= attempt.deadline_us:
                self._fail(attempt, OutcomeKind.FAILED, "deadline passed")
            elif attempt.state is not DecodeState.RUNNING:
                self._run_timer(attempt)

    def _run_timer(self, attempt: DecodeAttempt) -> None:
        waited_us = 0 if attempt.asked_us is None else self._now_us - attempt.asked_us
        if attempt.state is DecodeState.BOOKED and waited_us >= self._timing.grant_wait_us:
            self._say(attempt, wire.Refuse, "no free pages")
            self._fail(attempt, OutcomeKind.REFUSED, "no free pages")
        elif self._now_us >= attempt.lease_until_us:
            self._fail(attempt, OutcomeKind.FAILED, "prefill instance is silent about the attempt")

    def _chase(self, attempt: DecodeAttempt) -> None:
        """Ask again for the end of writes; after a lease without answer let the mover prove it."""
        if self._now_us - attempt.said_us < self._timing.repeat_us:
            return
        self._say(attempt, wire.Abort, attempt.ended_reason)
        if self._now_us < attempt.lease_until_us:
            return
        if attempt.state is DecodeState.ABORTING:
            attempt.handoff.advance(DecodeEvent.SILENT)
        assert attempt.peer is not None
        op = self._take_id()
        self._fences[op] = attempt
        self._out.append(Fence(op, attempt.peer))
        self._ask_for_restart()

    def _on_fenced(self, event: Fenced) -> None:
        attempt = self._fences.pop(event.op, None)
        if attempt is None or attempt.state not in _ENDING:
            self.stale["Fenced"] += 1
        elif event.proven:
            self._free_quarantined(attempt)

    def _ask_for_restart(self) -> None:
        counts = self._pool.counts()
        if not self._restart_asked and counts.quarantined * 100 > counts.total * QUARANTINED_PERCENT_MAX:
            self._restart_asked = self._draining = True
            self._out.append(RestartNeeded(f"{counts.quarantined} of {counts.total} pages are quarantined"))

    # -- small things

    def _on_pages_moved(self, _: PagesMoved) -> None:
        self.stale["PagesMoved"] += 1

    def _say(self, attempt: DecodeAttempt, kind: type[Any], *rest: object) -> None:
        attempt.said_us = self._now_us
        message = kind(attempt.key.request_id, attempt.key.attempt, self.ref, attempt.peer, *rest)
        self._out.append(SendPeer(message))

    def _report(self, attempt: DecodeAttempt, kind: OutcomeKind, reason: str = "", tokens_cached: int = 0) -> None:
        outcome = Outcome(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            kind=kind,
            reason=reason,
            tokens_cached=tokens_cached,
            tokens_generated=attempt.tokens_generated,
        )
        self._out.append(Report(attempt.conductor, outcome))

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id
