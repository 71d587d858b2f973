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
from collections.abc import Iterable, Sequence

import msgspec

from conductor.core.admission_queue import AdmissionQueue, Lane, Waiting
from conductor.core.attempt import Attempt
from conductor.core.attempts import Attempts
from conductor.core.decisions import AttemptFailed, Decision, HandoffComplete, Reject, Route
from conductor.core.events import (
    DrainRequested,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLost,
    KvPublished,
    LoadReported,
    OutcomeReported,
    RequestArrived,
    RequestFinished,
    Tick,
)
from conductor.core.fleet import Fleet
from conductor.core.growth import GrowthPredictor, QuantileGrowth
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.membership import Membership
from conductor.core.placement import Placement
from conductor.core.policy import PrefixAndLoadPolicy, Refusal, RoutingPolicy
from conductor.core.throughput import PlacementRate
from segue.errors import DeadlineExceeded, Overloaded, Unavailable
from segue.limits import QUEUED_REQUESTS_MAX
from segue.prefix_index import PrefixIndex
from segue.worker_messages import Outcome, OutcomeKind

FAILURES = (OutcomeKind.REFUSED, OutcomeKind.FAILED, OutcomeKind.CANCELLED)

SWEEP_ENTRIES_PER_STEP = 2048
"""About a millisecond, and only while blocks of gone instances are left in the index."""


class ConductorCore:
    """Pure: no clock, no I/O. `policy` and `growth` are the seams for prediction and joint cost."""

    def __init__(
        self,
        *,
        models_known: Iterable[str] = (),
        queue_max: int = QUEUED_REQUESTS_MAX,
        policy: RoutingPolicy | None = None,
        growth: GrowthPredictor | None = None,
    ) -> None:
        self.fleet = Fleet(models_known)
        self.index = PrefixIndex()
        self.counts: Counter[str] = Counter()
        """Events that were ignored, by reason."""
        self._health = HealthBook()
        self._growth: GrowthPredictor = growth or QuantileGrowth()
        self._attempts = Attempts(self.fleet)
        self._membership = Membership(self.fleet, self.index, self._attempts, self._health)
        self._placement = Placement(
            self.fleet, self.index, self._attempts.expected, self._health, self._growth, policy or PrefixAndLoadPolicy()
        )
        self._queue = AdmissionQueue()
        self._queue_max = queue_max
        self._rate = PlacementRate()
        self._room_changed = False
        self._hold_end_us: int | None = None

    def step(self, now_us: int, events: Sequence[Event]) -> list[Decision]:
        decisions: list[Decision] = []
        for event in events:
            decisions += self._take(now_us, event)
        decisions += [self._expire(waiting, now_us) for waiting in self._queue.expired(now_us)]
        decisions += self._place_waiting(now_us)
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
                self._room_changed = True
            case InstanceJoined() | InstanceLost() | InstanceDraining() | DrainRequested():
                self._room_changed = True
                return self._membership.take(now_us, event)
            case Tick():
                pass
        return []

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
            decisions += self._attempts.end(earlier, "superseded by a new attempt")
            self._room_changed = True
        reject = self._placement.refusal(request)
        if reject is not None and not _rides_out(request, reject):
            return [*decisions, reject]
        if len(self._queue) >= self._queue_max:
            return [*decisions, self._overloaded(request, f"{self._queue_max} requests are waiting")]
        self._queue.push(request, now_us)
        head = self._queue.head((request.model, request.kv_root))
        self._room_changed = self._room_changed or (head is not None and head.request is request)
        return decisions

    def _finish(self, event: RequestFinished) -> list[Decision]:
        if self._queue.remove(event.request_id) is not None:
            self._room_changed = True
            return []
        attempt = self._attempts.get(event.request_id)
        if attempt is None:
            return []
        self._room_changed = True
        return [*self._attempts.end(attempt, event.reason)]

    def _report(self, now_us: int, event: OutcomeReported) -> list[Decision]:
        outcome = event.outcome
        instance = self.fleet.find(event.ref)
        if instance is None:
            self.counts["outcome of a lost instance"] += 1
            return []
        if outcome.kind is OutcomeKind.FINISHED and outcome.tokens_generated:
            self._growth.learn(outcome.tokens_generated)
        attempt = self._attempts.get(outcome.request_id)
        if attempt is None or attempt.key.attempt != outcome.attempt or not attempt.involves(event.ref):
            self.counts["outcome of no live attempt"] += 1
            return []
        if outcome.kind in FAILURES:
            return self._fail(now_us, attempt, instance, outcome)
        if outcome.kind is OutcomeKind.PREEMPTED:
            return []
        if not self._attempts.report(attempt, event.ref, outcome.kind):
            self.counts["late or repeated outcome"] += 1
            return []
        self._room_changed = True
        return self._progress(now_us, attempt, event)

    def _fail(self, now_us: int, attempt: Attempt, instance: Instance, outcome: Outcome) -> list[Decision]:
        if outcome.kind is OutcomeKind.REFUSED:
            self._membership.hold_off(now_us, attempt, instance)
        elif outcome.kind is OutcomeKind.FAILED:
            self._membership.blame(now_us, attempt, instance)
        self._room_changed = True
        cancels = self._attempts.end(attempt, "the other side failed", told=instance.ref)
        reason = f"{outcome.kind} by {instance.manifest.name}: {outcome.reason}"
        return [*cancels, AttemptFailed(key=attempt.key, reason=reason)]

    def _progress(self, now_us: int, attempt: Attempt, event: OutcomeReported) -> list[Decision]:
        self._membership.credit(now_us, attempt, event.ref, event.outcome.kind)
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
                decision = self._place(now_us, waiting.request)
                if decision is None:
                    break
                self._queue.remove(waiting.request.request_id)
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
            if not _rides_out(waiting.request, reject):
                self._queue.remove(waiting.request.request_id)
                decisions.append(msgspec.structs.replace(reject, key=waiting.request.key))
        return decisions

    def _place(self, now_us: int, request: RequestArrived) -> Decision | None:
        """Route or reject the head of a lane; None: it waits on."""
        reject = self._placement.refusal(request)
        if reject is not None:
            return None if _rides_out(request, reject) else reject
        ranked = self._placement.ranked(request, now_us)
        if isinstance(ranked, Refusal):
            return _refused(request, ranked)
        if not ranked:
            return None
        choice = ranked[0]
        attempt = self._attempts.start(request, choice, self._placement.growth_tokens(request))
        self._rate.placed(now_us)
        return Route(
            key=attempt.key,
            prefill=attempt.prefill,
            decode=attempt.decode,
            tokens_cached_expected=choice.tokens_cached,
        )

    def _expire(self, waiting: Waiting, now_us: int) -> Decision:
        self._room_changed = True
        request = waiting.request
        waited_ms = (now_us - waiting.queued_us) // 1000
        if waiting.client_deadline_us and waiting.client_deadline_us <= now_us:
            message = f"the deadline passed after {waited_ms} ms in the queue"
            return Reject(key=request.key, code=DeadlineExceeded.code, message=message)
        refusal = self._placement.refusal(request)
        return refusal or self._overloaded(request, f"no instance had room for {waited_ms} ms")

    def _overloaded(self, request: RequestArrived, reason: str) -> Reject:
        return Reject(
            key=request.key,
            code=Overloaded.code,
            message=reason,
            resource="queue",
            retry_after_ms=self._rate.retry_after_ms(len(self._queue)),
        )


def _refused(request: RequestArrived, refusal: Refusal) -> Reject:
    return Reject(
        key=request.key,
        code=Overloaded.code,
        message=refusal.reason,
        resource=refusal.resource,
        retry_after_ms=refusal.retry_after_ms,
    )


def _rides_out(request: RequestArrived, reject: Reject) -> bool:
    """A stream that already runs waits in the queue for the only instance to come back."""
    return reject.code == Unavailable.code and request.attempt > 1
