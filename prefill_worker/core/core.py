"""The prefill machine: `step(now_us, events) -> decisions`, no clock and no I/O.

Order of work. An assigned attempt waits PLANNED. When less than one chunk of granted work is left, the next one (see
`asking`) asks D for pages; nothing is computed before D has granted, so that no prefill is wasted and P never waits for
D's memory while D waits for P. Full pages leave after every chunk, the partial tail with the first token, which goes to
the gateway without waiting for the transfer.

Ends. Abort is said to D only when no move of the attempt is outstanding, so it is itself the proof that nothing lands
any more. Messages about attempts that are not here are answered and counted (`stale`), never an error.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prefill_worker.core.asking import AskingTurn, tokens_uncached
from prefill_worker.core.attempt import PrefillAttempt, first_delta
from prefill_worker.core.sending import PageSender
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner, SeqUpdate
from segue.block_pool import BlockPool
from segue.errors import RequestError
from segue.handoff import PREFILL_FINAL, HandoffTiming, PrefillEvent, PrefillState, Tombstones, holder_share_us
from segue.handoff_links import PeerLinks, let_go
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import OutcomeKind
from worker_runtime import events as ev
from worker_runtime.intake import Strangers, refusal_of
from worker_runtime.outbox import Outbox

UNANSWERED_LEASES_MAX = 3
"""A grant request repeated for this many leases without any answer ends the attempt: D does not know it."""

_STOPPABLE = (PrefillState.PLANNED, PrefillState.COMPUTING, PrefillState.SENDING, PrefillState.SENT)


class PrefillCore:
    """`tokens_chunk` is the token budget of one step: how far ahead of its start an attempt asks for pages."""

    def __init__(
        self, ref: InstanceRef, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming, tokens_chunk: int
    ) -> None:
        self.ref = ref
        self._planner = planner
        self._pool = pool
        self._timing = timing
        self._tokens_chunk = tokens_chunk
        self._out = Outbox(ref)
        self._attempts: dict[AttemptRef, PrefillAttempt] = {}
        self._by_seq: dict[int, PrefillAttempt] = {}
        self._sender = PageSender(pool)
        self._links = PeerLinks(timing)
        self._tombstones = Tombstones(timing.lease_us)
        self._strangers = Strangers(ref, self._tombstones, self._out, (wire.Grant,))
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
            ev.LinkRestored: lambda event: self._links.restored(event.peer, self._now_us),
            ev.PeerGone: self._on_peer_gone,
            ev.PlanFinished: self._on_plan_finished,
            ev.PagesMoved: self._on_pages_moved,
            ev.GatewayLost: self._on_gateway_lost,
            ev.Drain: self._on_drain,
            ev.Stopping: self._on_stopping,
        }
        self._messages: dict[type, Callable[[PrefillAttempt, Any], None]] = {
            wire.Grant: self._on_grant,
            wire.Empty: self._on_empty,
            wire.Refuse: self._on_refuse,
            wire.Complete: self._on_complete,
            wire.Abort: self._on_abort,
            wire.Stale: self._on_stale,
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
        self._ask_for_grants()
        while (plan := self._planner.plan()) is not None:
            self._out.add(ev.RunPlan(plan))
        if kv_events := self._pool.drain_events():
            self._out.add(ev.PublishKv(kv_events))
        return self._out.take()

    def next_wakeup(self) -> int | None:
        """Leases are coarse: while anything is live, a look every repeat interval is enough."""
        return self._now_us + self._timing.repeat_us if self._attempts else None

    def load(self) -> ev.CoreLoad:
        counts = self._planner.counts()
        planned = [attempt for attempt in self._attempts.values() if attempt.state is PrefillState.PLANNED]
        return ev.CoreLoad(
            running=counts.running,
            waiting=counts.waiting + len(planned),
            tokens_queued=counts.tokens_queued + sum(tokens_uncached(attempt, self._pool) for attempt in planned),
            tokens_running=counts.tokens_running,
            preemptions=counts.preemptions,
            draining=self._draining,
        )

    def check(self) -> None:
        self._planner.check()

    def live(self, conductor: str = "") -> list[AttemptRef]:
        """Attempts that are here: all, or those of one Conductor."""
        return [key for key, attempt in self._attempts.items() if conductor in ("", attempt.conductor)]

    def states(self) -> dict[AttemptRef, PrefillState]:
        return {key: attempt.state for key, attempt in self._attempts.items()}

    # -- assignments and cancels

    def _on_assigned(self, event: ev.Assigned) -> None:
        assign = event.assign
        if assign.key in self._attempts:
            self.stale["assigned twice"] += 1
            return
        refusal = refusal_of(
            event, self._tombstones, self._now_us, draining=self._draining, tokens_max=self._planner.tokens_max
        )
        if refusal is not None or assign.decode is None:
            kind, reason = refusal or (OutcomeKind.REFUSED, "no decode instance named")
            self._out.turn_down(event, kind, reason)
            return
        attempt = PrefillAttempt(assign, assign.decode, event.conductor, next(self._seqs), self._now_us)
        attempt.holder_us = self._timing.holder_us
        self._attempts[attempt.key] = attempt
        self._by_seq[attempt.seq] = attempt
        if attempt.peer not in self._links:
            self._links.open(attempt.peer, self._now_us)
            self._out.add(ev.OpenLink(attempt.target))

    def _on_cancel(self, event: ev.CancelRequested) -> None:
        self._tombstones.bury(event.key, event.reason, self._now_us)
        for attempt in list(self._attempts.values()):
            same_request = attempt.key.request_id == event.key.request_id
            if same_request and event.key.attempt in (0, attempt.key.attempt):
                self._stop(attempt, OutcomeKind.CANCELLED, event.reason)

    def _on_gateway_lost(self, event: ev.GatewayLost) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.assign.gateway == event.gateway:
                self._stop(attempt, OutcomeKind.CANCELLED, "gateway lost")

    def _on_drain(self, _: ev.Drain) -> None:
        self._draining = True

    def _on_stopping(self, event: ev.Stopping) -> None:
        self._draining = True
        for attempt in list(self._attempts.values()):
            self._stop(attempt, OutcomeKind.FAILED, event.reason)

    # -- links

    def _on_link_ready(self, event: ev.LinkReady) -> None:
        self._links.mark_ready(event.peer, self._now_us)

    def _on_link_refused(self, event: ev.LinkRefused) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            self._stop(attempt, OutcomeKind.REFUSED, event.reason)

    def _on_peer_gone(self, event: ev.PeerGone) -> None:
        self._links.close(event.peer)
        for attempt in self._of_peer(event.peer):
            self._stop(attempt, OutcomeKind.FAILED, "decode instance is gone")

    def _of_peer(self, peer: InstanceRef) -> list[PrefillAttempt]:
        return [attempt for attempt in self._attempts.values() if attempt.peer == peer]

    # -- messages of D

    def _on_peer_message(self, event: ev.PeerMessage) -> None:
        message = event.message
        self._links.heard(message.source, self._now_us)
        if isinstance(message, wire.Heartbeat):
            self._on_heartbeat(message)
            return
        attempt = self._attempts.get(message.key)
        handler = self._messages.get(type(message))
        if attempt is None or handler is None or message.source != attempt.peer or message.target != self.ref:
            self.stale[type(message).__name__] += 1
            if attempt is not None and isinstance(message, wire.Stale) and message.target == self.ref:
                self._stop(attempt, OutcomeKind.FAILED, message.reason)  # somebody else answers at D's address
            self._strangers.answer(message, self._now_us, known=attempt is not None)
        else:
            handler(attempt, message)

    def _on_heartbeat(self, message: wire.Heartbeat) -> None:
        """What D has let go without our hearing of it: its word was lost with a connection."""
        if message.target != self.ref:
            return
        self._links.heard_beat(message)
        granted = {attempt.key: attempt.started_us for attempt in self._of_peer(message.source)}
        for key in let_go(message, granted):
            self._on_let_go(self._attempts[key], "decode instance has let it go")

    def _on_grant(self, attempt: PrefillAttempt, message: wire.Grant) -> None:
        if attempt.state is not PrefillState.PLANNED:
            self.stale["Grant"] += 1
            return
        attempt.handoff.advance(PrefillEvent.GRANTED)
        attempt.started_us = self._now_us
        attempt.first_block = attempt.blocks_handed = message.first_block
        attempt.pages_target = message.pages
        attempt.holder_us = holder_share_us(message.lease_us)
        assign = attempt.assign
        try:
            self._planner.add(
                attempt.seq,
                attempt.tokens,
                assign.tokens_prompt,
                assign.sampling,
                assign.hash_root,
                order=attempt.order,
                prefill_only=True,
            )
        except RequestError as error:
            self._stop(attempt, OutcomeKind.REFUSED, error.message)
            return
        self._out.report(attempt, OutcomeKind.PREFILL_STARTED)

    def _on_empty(self, attempt: PrefillAttempt, _: wire.Empty) -> None:
        if attempt.state is PrefillState.PLANNED:
            self._end(attempt, PrefillEvent.LET_GO, "empty")

    def _on_refuse(self, attempt: PrefillAttempt, message: wire.Refuse) -> None:
        if attempt.state is PrefillState.PLANNED:
            self._out.report(attempt, OutcomeKind.REFUSED, message.reason)
            self._end(attempt, PrefillEvent.LET_GO, message.reason)

    def _on_complete(self, attempt: PrefillAttempt, _: wire.Complete) -> None:
        if attempt.state is PrefillState.SENT:
            self._end(attempt, PrefillEvent.ACKNOWLEDGED, "complete")

    def _on_abort(self, attempt: PrefillAttempt, message: wire.Abort) -> None:
        self._tombstones.bury(attempt.key, message.reason, self._now_us)
        self._stop(attempt, OutcomeKind.FAILED, message.reason)

    def _on_stale(self, attempt: PrefillAttempt, message: wire.Stale) -> None:
        self._on_let_go(attempt, message.reason)

    def _on_let_go(self, attempt: PrefillAttempt, reason: str) -> None:
        if attempt.state is PrefillState.SENT:
            self._end(attempt, PrefillEvent.ACKNOWLEDGED, reason)
        else:
            self._stop(attempt, OutcomeKind.FAILED, reason)

    # -- computing and sending

    def _on_plan_finished(self, event: ev.PlanFinished) -> None:
        for update in self._planner.finished(event.result):
            attempt = self._by_seq.get(update.seq)
            if attempt is None or attempt.state not in (PrefillState.COMPUTING, PrefillState.SENDING):
                self.stale["plan result"] += 1
                continue
            self._apply_update(attempt, update)

    def _apply_update(self, attempt: PrefillAttempt, update: SeqUpdate) -> None:
        attempt.tokens_computed = update.tokens_computed
        if update.tokens and attempt.first_token is None:
            attempt.first_token = update.tokens[0]
            attempt.logprobs = update.logprobs[0] if update.logprobs else None
        attempt.finish = update.finish
        if update.tokens or update.finish or update.scores is not None:
            self._emit(attempt, update)
        if attempt.finish:
            self._out.extend(self._sender.cancel(attempt))
        else:
            self._send_ready_pages(attempt)
        self._settle(attempt)

    def _emit(self, attempt: PrefillAttempt, update: SeqUpdate) -> None:
        delta = first_delta(attempt, update, self._now_us)
        self._out.add(ev.PushTokens(attempt.assign.gateway, [delta]))
        if update.tokens or update.finish:
            self._out.report(attempt, OutcomeKind.PREFILL_DONE, tokens_cached=update.tokens_cached)

    def _send_ready_pages(self, attempt: PrefillAttempt) -> None:
        ready = attempt.blocks_ready(self._pool.block_size)
        if ready <= attempt.blocks_handed:
            return
        if attempt.state is PrefillState.COMPUTING:
            attempt.handoff.advance(PrefillEvent.FIRST_PAGES)
        self._out.add(self._sender.hand_over(attempt, self._planner.pages(attempt.seq), ready))

    def _on_pages_moved(self, event: ev.PagesMoved) -> None:
        finished = self._sender.finish(event)
        if finished is None:
            self.stale["PagesMoved"] += 1
            return
        attempt, first, count = finished
        if attempt.blocks_failed is None and attempt.state is PrefillState.SENDING:
            self._out.say(attempt, wire.PagesSent, first, count)
        self._settle(attempt)

    def _settle(self, attempt: PrefillAttempt) -> None:
        """Take the transition that the attempt is ready for, once none of its moves is outstanding."""
        if attempt.moves:
            return
        if attempt.state in (PrefillState.ABORTING, PrefillState.QUARANTINED):
            self._out.say(attempt, wire.Abort, attempt.ended_reason)
            self._end(attempt, PrefillEvent.FENCED, attempt.ended_reason)
        elif attempt.state in (PrefillState.COMPUTING, PrefillState.SENDING) and attempt.finish:
            self._out.say(attempt, wire.DoneAtP, attempt.finish)
            self._out.report(attempt, OutcomeKind.DONE_AT_P)
            self._end(attempt, PrefillEvent.LET_GO, "done at prefill")
        elif attempt.state is PrefillState.SENDING and attempt.first_token is not None:
            attempt.handoff.advance(PrefillEvent.ALL_MOVED)
            self._planner.release(attempt.seq)
            self._say_done(attempt)

    def _say_done(self, attempt: PrefillAttempt) -> None:
        assert attempt.first_token is not None
        attempt.said_us = self._now_us
        total = attempt.blocks_total(self._pool.block_size)
        valid = total if attempt.blocks_failed is None else attempt.blocks_failed
        self._out.say(attempt, wire.PrefillDone, attempt.first_token, attempt.logprobs, total, valid)

    # -- ends

    def _stop(self, attempt: PrefillAttempt, kind: OutcomeKind, reason: str) -> None:
        """Give up: stop computing at once, tell D as soon as no write is outstanding."""
        if attempt.state not in _STOPPABLE:
            return
        if attempt.state in (PrefillState.COMPUTING, PrefillState.SENDING):
            self._planner.cancel(attempt.seq)
        attempt.handoff.advance(PrefillEvent.ABORT)
        attempt.ended_reason = reason
        self._out.report(attempt, kind, reason)
        self._out.extend(self._sender.cancel(attempt))
        self._settle(attempt)

    def _end(self, attempt: PrefillAttempt, event: PrefillEvent, reason: str) -> None:
        if event is PrefillEvent.LET_GO and attempt.state is not PrefillState.PLANNED:
            self._planner.release(attempt.seq)
        attempt.handoff.advance(event)
        assert attempt.state in PREFILL_FINAL
        self._tombstones.bury(attempt.key, reason, self._now_us)
        del self._attempts[attempt.key]
        del self._by_seq[attempt.seq]

    # -- time

    def _run_timers(self) -> None:
        self._beat()
        for attempt in list(self._attempts.values()):
            if attempt.deadline_us is not None and self._now_us >= attempt.deadline_us:
                self._stop(attempt, OutcomeKind.FAILED, "deadline passed")
            else:
                self._run_timer(attempt)

    def _run_timer(self, attempt: PrefillAttempt) -> None:
        now_us, timing = self._now_us, self._timing
        if self._links.is_silent(attempt.peer, attempt.holder_us, attempt.arrived_us, now_us):
            self._stop(attempt, OutcomeKind.FAILED, "decode instance is silent")
        elif attempt.state is PrefillState.PLANNED and attempt.asked_first_us is not None:
            if now_us - attempt.asked_first_us >= UNANSWERED_LEASES_MAX * timing.lease_us:
                self._stop(attempt, OutcomeKind.FAILED, "decode instance does not answer the grant request")
            elif now_us - attempt.said_us >= timing.repeat_us:
                self._ask(attempt)
        elif attempt.state is PrefillState.SENT and now_us - attempt.said_us >= timing.repeat_us:
            self._say_done(attempt)

    def _beat(self) -> None:
        for peer in self._links.take_due_beats(self._now_us):
            live = [attempt.key for attempt in self._of_peer(peer)]
            self._out.add(ev.SendPeer(self._links.beat(self.ref, peer, live, self._now_us)))

    # -- asking

    def _ask_for_grants(self) -> None:
        turn = AskingTurn(self._now_us, self._timing.repeat_us, self._tokens_chunk)
        for attempt in turn.choose(self._attempts.values(), self._links, self._pool):
            self._ask(attempt)

    def _ask(self, attempt: PrefillAttempt) -> None:
        attempt.said_us = self._now_us
        self._out.say(attempt, wire.GrantRequest)
