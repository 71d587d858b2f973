"""The Conductor core: events and a time in, decisions out.

Theory. A request is in one of two places: the admission queue, or the table of live attempts. Arriving puts it into
the queue; leaving the queue is a Route (into the table) or a Reject; leaving the table is an AttemptFailed, or the
gateway's RequestFinished. So every accepted attempt gets exactly one of Reject, AttemptFailed, or is finished by its
gateway, and whatever it booked is released at that moment, whoever was at fault.

Decisions of one step are to be carried out in order. Nothing here waits: an attempt that a worker never answers is
ended by the loss of that worker or by its gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from conductor.core.admission import Admission, Objectives, Verdict
from conductor.core.admission_queue import AdmissionQueue, Lane, Waiting
from conductor.core.attempt import Attempt
from conductor.core.attempts import Attempts
from conductor.core.beliefs import PRIOR_COST, Beliefs
from conductor.core.decisions import AttemptFailed, CancelAttempt, Decision, HandoffComplete, Reject, Route
from conductor.core.events import (
    Event,
    InstanceLost,
    KvPublished,
    LoadReported,
    MembershipEvent,
    OutcomeReported,
    RequestArrived,
    RequestFinished,
    Tick,
)
from conductor.core.fleet import Fleet
from conductor.core.growth import GrowthPredictor, QuantileGrowth
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.joint_policy import JointPolicy
from conductor.core.latency import LatencyForecast
from conductor.core.membership import Membership
from conductor.core.placement import Placement, reject_of, rides_out
from conductor.core.policy import Refusal, RoutingPolicy
from conductor.core.throughput import PlacementRate
from conductor.core.transfers import TransferWatch
from segue.cost_model import CostModel
from segue.errors import DeadlineExceeded, Unavailable
from segue.ids import AttemptRef, InstanceRef
from segue.limits import QUEUED_REQUESTS_MAX
from segue.prefix_index import PrefixIndex
from segue.worker_messages import Outcome, OutcomeKind

FAILURES = (OutcomeKind.REFUSED, OutcomeKind.FAILED, OutcomeKind.CANCELLED)

SWEEP_ENTRIES_PER_STEP = 2048
"""About a millisecond, and only while blocks of gone instances are left in the index."""


class ConductorCore:
    """Pure: no clock, no I/O. `policy` and `growth` are the seams for prediction and joint cost.

    Without `objectives` everything is admitted that fits. `cost` is where predictions start from; without it they are
    learned from what is served. `tenant_queue_max` 0: a tenant may fill the queue while nobody else wants it.
    """

    def __init__(
        self,
        *,
        models_known: Iterable[str] = (),
        queue_max: int = QUEUED_REQUESTS_MAX,
        policy: RoutingPolicy | None = None,
        growth: GrowthPredictor | None = None,
        beliefs: Beliefs | None = None,
        objectives: Objectives | None = None,
        cost: CostModel | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        tenant_queue_max: int = 0,
    ) -> None:
        self.fleet = Fleet(models_known)
        self.index = PrefixIndex()
        self.counts: Counter[str] = Counter()
        """Events that were ignored, by reason."""
        self.beliefs = beliefs or Beliefs(cost=cost or PRIOR_COST)
        self._health = HealthBook()
        self._growth: GrowthPredictor = growth or QuantileGrowth()
        self._attempts = Attempts(self.fleet)
        self._membership = Membership(self.fleet, self.index, self._attempts, self._health, self.beliefs.reuse)
        self.forecast = LatencyForecast(cost)
        self._transfers = TransferWatch(self.beliefs.links)
        self._placement = Placement(
            self.fleet,
            self.index,
            self._attempts,
            self._health,
            self._growth,
            policy or JointPolicy(),
            self.beliefs,
            self.forecast,
        )
        self._queue = AdmissionQueue(tenant_weights)
        self._queue_max = queue_max
        self._tenant_queue_max = tenant_queue_max or queue_max + 1
        self.admission = Admission(objectives, self.forecast, self._queue)
        self._arrived: list[str] = []
        """Of this step, in the queue: those for whom it is too long are told before the step ends."""
        self._rate = PlacementRate()
        self._room_changed = False
        self._hold_end_us: int | None = None

    def step(self, now_us: int, events: Sequence[Event]) -> list[Decision]:
        decisions: list[Decision] = []
        for event in events:
            decisions += self._take(now_us, event)
        decisions += [self._expire(waiting, now_us) for waiting in self._queue.expired(now_us)]
        decisions += self._place_waiting(now_us)
        decisions += self._turn_away(now_us)
        decisions += self._membership.resyncs(now_us)
        self.index.sweep(SWEEP_ENTRIES_PER_STEP)
        return decisions

    def next_wakeup(self) -> int | None:
        hold_end_us = self._hold_end_us if len(self._queue) else None
        wakeups = (self._queue.next_expiry(), self._membership.next_resync(), hold_end_us)
        return min((wakeup for wakeup in wakeups if wakeup is not None), default=None)

    @property
    def requests_queued(self) -> int:
        return len(self._queue)

    @property
    def attempts_live(self) -> int:
        return len(self._attempts)

    def check(self) -> None:
        self.index.check()
        self._queue.check()
        self._attempts.check()
        self.forecast.check()
        assert len(self._transfers) <= len(self._attempts), "a transfer of no live attempt"
        assert len(self._queue) <= self._queue_max, "the queue grew past its maximum"
        for attempt in self._attempts:
            assert attempt.key.request_id not in self._queue, "a request is queued and live at once"
            assert all(self.fleet.find(ref) for ref in attempt.live_sides()), "a live side on a lost instance"

    # -- events

    def _take(self, now_us: int, event: Event) -> list[Decision]:
        match event:
            case RequestArrived():
                return self._arrive(now_us, event)
            case RequestFinished():
                return self._finish(event)
            case OutcomeReported():
                return self._report(now_us, event)
            case KvPublished():
                self._membership.take_kv(event.batch, now_us)
            case LoadReported():
                self._membership.take_load(event.report, now_us)
                instance = self.fleet.find(event.report.ref)
                if instance is not None and instance.load is event.report:
                    self.forecast.take_load(instance, event.report, now_us)
                self._room_changed = True
            case Tick():
                pass
            case _:
                return self._take_membership(now_us, event)
        return []

    def _take_membership(self, now_us: int, event: MembershipEvent) -> list[Decision]:
        self._room_changed = True
        decisions = self._membership.take(now_us, event)
        for decision in decisions:
            if isinstance(decision, AttemptFailed):
                self._forget(decision.key)
                self.admission.log.ended(decision.key, decision.reason)
        if isinstance(event, InstanceLost) and self.fleet.find(event.ref) is None:
            self.forecast.forget(event.ref.uuid)
        return decisions

    def _arrive(self, now_us: int, request: RequestArrived) -> list[Decision]:
        decisions: list[Decision] = []
        earlier = self._attempts.get(request.request_id)
        waiting = self._queue.get(request.request_id)
        newest = max(earlier.key.attempt if earlier else 0, waiting.request.attempt if waiting else 0)
        if request.attempt <= newest:
            self.counts["duplicate arrival"] += 1
            return []
        self._queue.remove(request.request_id)
        if earlier is not None:
            decisions += self._end(earlier, "superseded by a new attempt")
            self._room_changed = True
        reject = self._placement.refusal(request)
        if reject is not None and not rides_out(request, reject):
            return [*decisions, reject]
        full, displaced = self._make_room(request, now_us)
        decisions += displaced
        if full is not None:
            return [*decisions, full]
        self.admission.push(request, now_us)
        self._arrived.append(request.request_id)
        head = self._queue.head((request.model, request.kv_root))
        self._room_changed = self._room_changed or (head is not None and head.request is request)
        return decisions

    def _make_room(self, request: RequestArrived, now_us: int) -> tuple[Reject | None, list[Decision]]:
        """A place in the queue: why there is none for `request`, and who had to go for it."""
        if self._queue.waiting_of(request.model, request.tenant) >= self._tenant_queue_max and request.attempt == 1:
            message = f"{self._tenant_queue_max} requests of this tenant are waiting"
            return self._overloaded(request, message, now_us, resource="tenant queue"), []
        if len(self._queue) < self._queue_max:
            return None, []
        displaced = self._queue.displaced_by(request)
        if displaced is None:
            return self._overloaded(request, f"{self._queue_max} requests are waiting", now_us), []
        self._queue.remove(displaced.request.request_id)
        message = f"{self._queue_max} requests are waiting, and one with a better claim has come"
        return None, [self._overloaded(displaced.request, message, now_us, displaced)]

    def _finish(self, event: RequestFinished) -> list[Decision]:
        if self._queue.remove(event.request_id) is not None:
            self._room_changed = True
            return []
        attempt = self._attempts.get(event.request_id)
        if attempt is None:
            return []
        self._room_changed = True
        return [*self._end(attempt, event.reason)]

    def _end(self, attempt: Attempt, reason: str, told: InstanceRef | None = None) -> list[CancelAttempt]:
        self._forget(attempt.key)
        self.admission.log.ended(attempt.key, reason)
        return self._attempts.end(attempt, reason, told=told)

    def _forget(self, key: AttemptRef) -> None:
        self.forecast.ended(key)
        self._transfers.ended(key)

    def _report(self, now_us: int, event: OutcomeReported) -> list[Decision]:
        outcome = event.outcome
        instance = self.fleet.find(event.ref)
        if instance is None:
            self.counts["outcome of a lost instance"] += 1
            return []
        if outcome.kind is OutcomeKind.FINISHED and outcome.tokens_generated:
            self._growth.learn(outcome.tokens_generated)
        key = AttemptRef(outcome.request_id, outcome.attempt)
        actual = self.forecast.report(key, event.ref.uuid, outcome, now_us)
        if actual is not None:
            self.admission.log.complete(key, actual)
        attempt = self._attempts.get(outcome.request_id)
        if attempt is None or attempt.key.attempt != outcome.attempt or not attempt.involves(event.ref):
            self.counts["outcome of no live attempt"] += 1
            return []
        if outcome.kind in FAILURES:
            return self._fail(now_us, attempt, instance, outcome)
        if outcome.kind is OutcomeKind.PREEMPTED:
            return []
        if not self._attempts.report(attempt, event.ref, outcome.kind, now_us):
            self.counts["late or repeated outcome"] += 1
            return []
        self._transfers.report(key, outcome.kind, now_us)
        self._room_changed = True
        return self._progress(now_us, attempt, event)

    def _fail(self, now_us: int, attempt: Attempt, instance: Instance, outcome: Outcome) -> list[Decision]:
        if outcome.kind is OutcomeKind.REFUSED:
            self._membership.hold_off(now_us, attempt, instance)
        elif outcome.kind is OutcomeKind.FAILED:
            self._membership.blame(now_us, attempt, instance)
        self._room_changed = True
        reason = f"{outcome.kind} by {instance.manifest.name}: {outcome.reason}"
        self.admission.log.ended(attempt.key, reason)
        cancels = self._end(attempt, "the other side failed", told=instance.ref)
        return [*cancels, AttemptFailed(key=attempt.key, reason=reason)]

    def _progress(self, now_us: int, attempt: Attempt, event: OutcomeReported) -> list[Decision]:
        self._membership.credit(now_us, attempt, event.ref, event.outcome.kind)
        if event.outcome.kind is OutcomeKind.EMPTY:
            self.admission.log.let_go(attempt.key)
        if event.outcome.kind is OutcomeKind.HANDOFF_COMPLETE and not attempt.handed_off:
            attempt.handed_off = True
            return [HandoffComplete(key=attempt.key)]
        return []

    # -- queue

    def _place_waiting(self, now_us: int) -> list[Decision]:
        """Place heads while there is room. Only after a change: a blocked head costs a full ranking to try again."""
        if self._hold_end_us is not None and self._hold_end_us <= now_us:
            self._room_changed = True
        if not self._room_changed:
            return []
        self._room_changed = False
        decisions: list[Decision] = []
        for lane in self._queue.lanes():
            decisions += self._reject_unservable(lane)
            while (waiting := self._queue.head(lane)) is not None:
                decision = self._place(now_us, waiting)
                if decision is None:
                    break
                decisions.append(decision)
        self._hold_end_us = self._placement.next_hold_end(now_us) if len(self._queue) else None
        return decisions

    def _reject_unservable(self, lane: Lane) -> list[Decision]:
        """When the lane's model lost its instances: new requests get their answer now."""
        head = self._queue.head(lane)
        reject = None if head is None else self._placement.refusal(head.request)
        if reject is None or reject.code != Unavailable.code:
            return []
        decisions: list[Decision] = []
        for waiting in self._queue.in_lane(lane):
            if not rides_out(waiting.request, reject):
                self._queue.remove(waiting.request.request_id)
                decisions.append(msgspec.structs.replace(reject, key=waiting.request.key))
        return decisions

    def _place(self, now_us: int, waiting: Waiting) -> Decision | None:
        """Route or reject the head of a lane, which leaves the queue; None: it waits on."""
        request = waiting.request
        reject = self._placement.refusal(request)
        if reject is not None:
            if rides_out(request, reject):
                return None
            self._queue.remove(request.request_id)
            return reject
        ranked = self._placement.ranked(
            request, now_us, waited_us=now_us - waiting.queued_us, requests_waiting=len(self._queue)
        )
        if isinstance(ranked, Refusal):
            self._queue.remove(request.request_id)
            return self._refused(waiting, ranked, now_us)
        if not ranked:
            return None
        verdict = self.admission.judge(waiting, ranked, now_us)
        if verdict.refusal is not None:
            self._queue.remove(request.request_id)
            return self._refused(waiting, verdict.refusal, now_us, verdict, len(ranked))
        return None if verdict.choice is None else self._route(waiting, verdict, len(ranked), now_us)

    def _route(self, waiting: Waiting, verdict: Verdict, choices: int, now_us: int) -> Route:
        request, choice = waiting.request, verdict.choice
        assert choice is not None, "a verdict without a choice routes nothing"
        self._queue.remove(request.request_id)
        attempt = self._attempts.start(request, choice, self._placement.growth_tokens(request), now_us)
        self._transfers.routed(request, choice)
        self.admission.placed(waiting, verdict, choices, now_us)
        self._rate.placed(now_us)
        return Route(
            key=attempt.key,
            prefill=attempt.prefill,
            decode=attempt.decode,
            tokens_cached_expected=choice.tokens_cached,
            source=None if choice.source is None else choice.source.ref,
            tokens_fetched=choice.tokens_fetched,
        )

    def _turn_away(self, now_us: int) -> list[Decision]:
        """Those who came in this step and would wait in vain are told at once."""
        arrived, self._arrived = self._arrived, []
        decisions: list[Decision] = []
        for request_id in arrived:
            waiting = self._queue.get(request_id)
            if waiting is None:
                continue
            group = self.fleet.group_of_root(waiting.request.model, waiting.request.kv_root)
            computing = () if group is None else group.candidates.prefills or group.candidates.locals
            refusal = self.admission.hopeless(waiting, len(computing), now_us)
            if refusal is not None:
                self._queue.remove(request_id)
                self._room_changed = True
                decisions.append(self._refused(waiting, refusal, now_us))
        return decisions

    def _expire(self, waiting: Waiting, now_us: int) -> Decision:
        self._room_changed = True
        request = waiting.request
        waited_ms = (now_us - waiting.queued_us) // 1000
        if waiting.client_deadline_us and waiting.client_deadline_us <= now_us:
            message = f"the deadline passed after {waited_ms} ms in the queue"
            return Reject(key=request.key, code=DeadlineExceeded.code, message=message)
        refusal = self._placement.refusal(request)
        if refusal is not None:
            return refusal
        overdue = self.admission.overdue(waiting, now_us)
        if overdue is not None:
            return self._refused(waiting, overdue, now_us)
        return self._overloaded(request, f"no instance had room for {waited_ms} ms", now_us, waiting)

    def _overloaded(
        self, request: RequestArrived, reason: str, now_us: int, waiting: Waiting | None = None, resource: str = "queue"
    ) -> Reject:
        retry_after_ms = self._rate.retry_after_ms(len(self._queue))
        reject = reject_of(request, Refusal(reason=reason, resource=resource, retry_after_ms=retry_after_ms))
        waited_us = 0 if waiting is None else now_us - waiting.queued_us
        self.admission.rejected(request, reject, now_us, waited_us, None, 0)
        return reject

    def _refused(
        self, waiting: Waiting, refusal: Refusal, now_us: int, verdict: Verdict | None = None, choices: int = 0
    ) -> Reject:
        reject = reject_of(waiting.request, refusal)
        self.admission.rejected(waiting.request, reject, now_us, now_us - waiting.queued_us, verdict, choices)
        return reject
