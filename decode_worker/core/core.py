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

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.core.attempt import DecodeAttempt
from decode_worker.core.emission import Emission
from decode_worker.core.joining import land, start_locally
from decode_worker.core.lending import ENDING, EarlyRequests, Lender
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner, SeqUpdate
from segue.block_pool import BlockPool
from segue.handoff import DecodeEvent, DecodeState, HandoffTiming, Tombstones
from segue.handoff_links import PeerLinks, let_go
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import OutcomeKind
from worker_runtime import events as ev
from worker_runtime.intake import Strangers, refusal_of
from worker_runtime.outbox import Outbox

_LENT = (DecodeState.GRANTED, DecodeState.RECEIVING)
_ANSWERED = (wire.GrantRequest, wire.PagesSent, wire.PrefillDone, wire.DoneAtP)


class DecodeCore:
    def __init__(self, ref: InstanceRef, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming) -> None:
        self.ref = ref
        self._planner = planner
        self._pool = pool
        self._timing = timing
        self._out = Outbox(ref)
        self._attempts: dict[AttemptRef, DecodeAttempt] = {}
        self._by_seq: dict[int, DecodeAttempt] = {}
        self._lender = Lender(planner, pool, timing, self._out)
        self._early = EarlyRequests(timing.lease_us)
        self._links = PeerLinks(timing)
        self._tombstones = Tombstones(timing.lease_us)
        self._strangers = Strangers(ref, self._tombstones, self._out, _ANSWERED)
        self._emission = Emission()
        self._draining = False
        self._seqs = itertools.count(1)
        self._now_us = 0
        self.stale: Counter[str] = Counter()
        """Messages that no longer mean anything, by kind: answered and counted, never an error."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Assigned: self._on_assigned,
            ev.CancelRequested: self._on_cancel,
            ev.PeerMessage: self._on_peer_message,
            ev.LinkReady: self._on_link_ready,
            ev.LinkRefused: self._on_link_refused,
            ev.PeerGone: self._on_peer_gone,
            ev.PlanFinished: self._on_plan_finished,
            ev.Fenced: self._on_fenced,
            ev.GatewayLost: self._on_gateway_lost,
            ev.Drain: self._on_drain,
            ev.Stopping: self._on_stopping,
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

    def step(self, now_us: int, events: Sequence[ev.Event]) -> list[ev.Decision]:
        self._now_us = now_us
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is None:
                self.stale[type(event).__name__] += 1
            else:
                handler(event)
        self._run_timers()
        self._grant_in_order()
        while (plan := self._planner.plan()) is not None:
            self._out.add(ev.RunPlan(plan))
        self._out.extend(self._emission.take())
        if kv_events := self._pool.drain_events():
            self._out.add(ev.PublishKv(kv_events))
        return self._out.take()

    def next_wakeup(self) -> int | None:
        """Leases are coarse: while any attempt involves a peer, a look every repeat interval is enough."""
        timed = len(self._early) > 0 or any(
            attempt.state is not DecodeState.RUNNING or attempt.deadline_us is not None
            for attempt in self._attempts.values()
        )
        return self._now_us + self._timing.repeat_us if timed else None

    def load(self) -> ev.CoreLoad:
        counts = self._planner.counts()
        remote = [attempt for attempt in self._attempts.values() if attempt.state is not DecodeState.RUNNING]
        return ev.CoreLoad(
            running=counts.running,
            waiting=counts.waiting + len(remote),
            tokens_queued=counts.tokens_queued,
            tokens_running=counts.tokens_running,
            preemptions=counts.preemptions,
            draining=self._is_draining,
        )

    def check(self) -> None:
        self._planner.check()

    @property
    def _is_draining(self) -> bool:
        return self._draining or self._lender.restart_asked

    def live(self, conductor: str = "") -> list[AttemptRef]:
        return [key for key, attempt in self._attempts.items() if conductor in ("", attempt.conductor)]

    def states(self) -> dict[AttemptRef, DecodeState]:
        return {key: attempt.state for key, attempt in self._attempts.items()}

    # -- assignments and cancels

    def _on_assigned(self, event: ev.Assigned) -> None:
        assign = event.assign
        if assign.key in self._attempts:
            self.stale["assigned twice"] += 1
            return
        refusal = refusal_of(
            event, self._tombstones, self._now_us, draining=self._is_draining, tokens_max=self._planner.tokens_max
        )
        if refusal is not None:
            self._out.turn_down(event, *refusal)
            return
        attempt = DecodeAttempt(
            assign, event.conductor, next(self._seqs), self._pool.block_size, self._now_us, self._timing.lease_us
        )
        self._attempts[attempt.key] = attempt
        self._by_seq[attempt.seq] = attempt
        if attempt.peer is None:
            self._run_locally(attempt)
        elif self._early.take(attempt) is not None:
            self._lender.ask(attempt, self._now_us)

    def _run_locally(self, attempt: DecodeAttempt) -> None:
        refusal = start_locally(self._planner, attempt)
        if refusal:
            self._fail(attempt, OutcomeKind.REFUSED, refusal)
            return
        attempt.handoff.advance(DecodeEvent.LOCAL)

    def _on_cancel(self, event: ev.CancelRequested) -> None:
        self._tombstones.bury(event.key, event.reason, self._now_us)
        for attempt in list(self._attempts.values()):
            same_request = attempt.key.request_id == event.key.request_id
            if same_request and event.key.attempt in (0, attempt.key.attempt):
                self._fail(attempt, OutcomeKind.CANCELLED, event.reason)

    def _on_gateway_lost(self, event: ev.GatewayLost) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.assign.gateway == event.gateway:
                self._fail(attempt, OutcomeKind.CANCELLED, "gateway lost")

    def _on_drain(self, _: ev.Drain) -> None:
        self._draining = True

    def _on_stopping(self, event: ev.Stopping) -> None:
        self._draining = True
        for attempt in list(self._attempts.values()):
            self._fail(attempt, OutcomeKind.FAILED, event.reason)

    # -- links

    def _on_link_ready(self, event: ev.LinkReady) -> None:
        self._links.open(event.peer, self._now_us)
        self._links.mark_ready(event.peer, self._now_us)

    def _on_link_refused(self, event: ev.LinkRefused) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            if attempt.state is DecodeState.BOOKED:
                self._fail(attempt, OutcomeKind.REFUSED, event.reason)

    def _on_peer_gone(self, event: ev.PeerGone) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            self._fail(attempt, OutcomeKind.FAILED, "prefill instance is gone")
            if attempt.state in ENDING:
                self._recover(attempt)

    def _of_peer(self, peer: InstanceRef) -> list[DecodeAttempt]:
        """Attempts that still need this prefill instance, or wait for its last write."""
        return [
            attempt
            for attempt in self._attempts.values()
            if attempt.peer == peer and attempt.state is not DecodeState.RUNNING
        ]

    # -- messages of P

    def _on_peer_message(self, event: ev.PeerMessage) -> None:
        message = event.message
        self._links.heard(message.source, self._now_us)
        if isinstance(message, wire.Heartbeat):
            self._on_heartbeat(message)
            return
        attempt = self._attempts.get(message.key)
        handler = self._messages.get(type(message))
        if attempt is None or handler is None or message.source != attempt.peer or message.target != self.ref:
            self._on_stranger(message, known=attempt is not None)
            return
        attempt.lease_until_us = self._now_us + self._timing.lease_us
        handler(attempt, message)

    def _on_stranger(self, message: wire.AttemptMessage, *, known: bool) -> None:
        fresh = not known and message.target == self.ref and self._tombstones.reason(message.key, self._now_us) is None
        if fresh and isinstance(message, wire.GrantRequest):
            self._early.keep(message, self._now_us)
            return
        self.stale[type(message).__name__] += 1
        self._strangers.answer(message, self._now_us, known=known)

    def _on_heartbeat(self, message: wire.Heartbeat) -> None:
        """P's list renews leases, and shows what P has let go without our hearing of it. It is answered at once."""
        if message.target != self.ref:
            return
        self.stale["Heartbeat entry"] += self._lender.renew(self._attempts, message, self._now_us)
        self._links.heard_beat(message)
        asked = {attempt.key: attempt.asked_us for attempt in self._of_peer(message.source)}
        for key in let_go(message, asked):
            self._stopped(self._attempts[key], "prefill instance has let it go")
        self._beat(message.source)

    def _beat(self, peer: InstanceRef) -> None:
        """Name what P should go on with: not what only waits for its last write."""
        live = [attempt.key for attempt in self._of_peer(peer) if attempt.state not in ENDING]
        self._out.add(ev.SendPeer(self._links.beat(self.ref, peer, live, self._now_us)))

    def _on_grant_request(self, attempt: DecodeAttempt, _: wire.GrantRequest) -> None:
        if attempt.state is DecodeState.BOOKED:
            self._lender.ask(attempt, self._now_us)
        elif attempt.state is DecodeState.GRANTED:
            self._lender.say_grant(attempt)
        elif attempt.state is DecodeState.RUNNING and not attempt.was_handed_over:
            self._out.say(attempt, wire.Empty)
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
            self._out.say(attempt, wire.Complete)
        elif attempt.state in ENDING:
            self._recover(attempt)
        else:
            self.stale["PrefillDone"] += 1

    def _land(self, attempt: DecodeAttempt, message: wire.PrefillDone) -> None:
        self._lender.take_back(attempt)
        refusal = land(self._planner, attempt, message, self._pool.block_size)
        if refusal:
            self._fail(attempt, OutcomeKind.REFUSED, refusal)
            return
        attempt.handoff.advance(DecodeEvent.JOIN)
        self._out.say(attempt, wire.Complete)
        self._out.report(attempt, OutcomeKind.HANDOFF_COMPLETE)

    def _on_done_at_p(self, attempt: DecodeAttempt, message: wire.DoneAtP) -> None:
        self._stopped(attempt, f"done at prefill: {message.finish}", is_failure=False)

    def _on_abort(self, attempt: DecodeAttempt, message: wire.Abort) -> None:
        self._out.say(attempt, wire.AbortAck)
        self._on_no_more_writes(attempt, message)

    def _on_no_more_writes(self, attempt: DecodeAttempt, message: Any) -> None:
        self._stopped(attempt, getattr(message, "reason", "prefill instance stopped"))

    def _stopped(self, attempt: DecodeAttempt, reason: str, *, is_failure: bool = True) -> None:
        """P has stopped and nothing of it can land any more."""
        if attempt.state in ENDING:
            self._recover(attempt)
        elif attempt.state in (*_LENT, DecodeState.BOOKED):
            self._lender.give_back(attempt)
            if is_failure:
                self._out.report(attempt, OutcomeKind.FAILED, reason)
            self._end(attempt, DecodeEvent.END, reason)
        else:
            self.stale["end of writes"] += 1

    # -- granting

    def _grant_in_order(self) -> None:
        """Those who asked later wait behind the first that finds no room."""
        for attempt in self._lender.asking():
            if self._lender.lacks_at_most_a_block(attempt):
                self._lender.withdraw(attempt)
                self._out.say(attempt, wire.Empty)
                self._out.report(attempt, OutcomeKind.EMPTY)
                self._run_locally(attempt)
            elif not self._lender.grant(attempt, self._now_us):
                break

    def _recover(self, attempt: DecodeAttempt) -> None:
        self._lender.recover(attempt)
        self._end(attempt, DecodeEvent.FENCED, attempt.ended_reason)

    # -- ends

    def _fail(self, attempt: DecodeAttempt, kind: OutcomeKind, reason: str) -> None:
        """End an attempt in any live state; pages that P may still write are quarantined."""
        if attempt.state in ENDING:
            return
        self._out.report(attempt, kind, reason)
        if attempt.state in _LENT:
            self._lender.quarantine(attempt, reason, self._now_us)
            return
        if attempt.state is DecodeState.RUNNING:
            self._planner.cancel(attempt.seq)
        self._lender.give_back(attempt)
        self._end(attempt, DecodeEvent.END, reason)

    def _end(self, attempt: DecodeAttempt, event: DecodeEvent, reason: str) -> None:
        attempt.handoff.advance(event)
        self._lender.withdraw(attempt)
        self._tombstones.bury(attempt.key, reason, self._now_us)
        del self._attempts[attempt.key]
        del self._by_seq[attempt.seq]

    # -- running

    def _on_plan_finished(self, event: ev.PlanFinished) -> None:
        for update in self._planner.finished(event.result):
            attempt = self._by_seq.get(update.seq)
            if attempt is None:
                self.stale["plan result"] += 1
            elif update.tokens or update.finish or update.scores is not None:
                self._apply_update(attempt, update)

    def _apply_update(self, attempt: DecodeAttempt, update: SeqUpdate) -> None:
        self._emission.add(attempt, update)
        if update.tokens and not attempt.tokens_generated and not attempt.was_handed_over:
            self._out.report(attempt, OutcomeKind.PREFILL_DONE, tokens_cached=update.tokens_cached)
        attempt.position += len(update.tokens)
        attempt.tokens_generated += len(update.tokens)
        if update.finish:
            self._out.report(attempt, OutcomeKind.FINISHED, update.finish, tokens_cached=update.tokens_cached)
            self._planner.release(attempt.seq)
            self._end(attempt, DecodeEvent.END, update.finish)

    # -- time

    def _run_timers(self) -> None:
        for peer in self._links.take_due_beats(self._now_us):
            if self._of_peer(peer):
                self._beat(peer)
        for message in self._early.expire(self._now_us):
            self._strangers.answer(message, self._now_us, known=False)
        for attempt in list(self._attempts.values()):
            if attempt.state in ENDING:
                self._lender.chase(attempt, self._now_us)
            elif attempt.deadline_us is not None and self._now_us >= attempt.deadline_us:
                self._fail(attempt, OutcomeKind.FAILED, "deadline passed")
            elif attempt.state is not DecodeState.RUNNING:
                self._run_timer(attempt)

    def _run_timer(self, attempt: DecodeAttempt) -> None:
        waited_us = 0 if attempt.asked_us is None else self._now_us - attempt.asked_us
        if attempt.state is DecodeState.BOOKED and waited_us >= self._timing.grant_wait_us:
            self._out.say(attempt, wire.Refuse, "no free pages")
            self._fail(attempt, OutcomeKind.REFUSED, "no free pages")
        elif self._now_us >= attempt.lease_until_us:
            self._fail(attempt, OutcomeKind.FAILED, "prefill instance is silent about the attempt")

    def _on_fenced(self, event: ev.Fenced) -> None:
        attempt = self._lender.fenced(event)
        if attempt is not None:
            self._recover(attempt)
