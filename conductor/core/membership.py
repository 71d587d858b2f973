"""Instances come, report, fail and go; what that means for their blocks, their attempts and their attraction."""

from __future__ import annotations

from conductor.core.attempt import Attempt
from conductor.core.attempts import Attempts
from conductor.core.decisions import AttemptFailed, CancelAttempt, Decision, Drain, Resync
from conductor.core.events import (
    AttemptsHeld,
    DrainRequested,
    InstanceAway,
    InstanceDraining,
    InstanceJoined,
    InstanceLost,
    InstanceReturned,
    MembershipEvent,
)
from conductor.core.fleet import Fleet
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.reconnection import Reconnections
from conductor.core.resync import ResyncSchedule
from conductor.core.reuse import ReuseBook
from segue.ids import AttemptRef, InstanceRef
from segue.kv_events import BlocksRemoved, KvEventBatch, LoadReport
from segue.prefix_index import Applied, PrefixIndex
from segue.worker_messages import OutcomeKind

ORPHANED_INSTANCES_MAX = 64
"""Lost instances whose unfinished attempts are remembered, in case only the connection broke."""

SUCCESSES = {OutcomeKind.PREFILL_DONE, OutcomeKind.HANDOFF_COMPLETE, OutcomeKind.DONE_AT_P, OutcomeKind.FINISHED}


class Membership:
    """Joins, losses, drains, reports. An instance is one (uuid, incarnation); a newer one replaces the older."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, attempts: Attempts, health: HealthBook, reuse: ReuseBook
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._attempts = attempts
        self._health = health
        self._reuse = reuse
        self._resyncs = ResyncSchedule()
        self._orphans: dict[InstanceRef, list[AttemptRef]] = {}
        self._reconnections = Reconnections(attempts)

    def take(self, now_us: int, event: MembershipEvent) -> list[Decision]:
        match event:
            case InstanceJoined():
                return self._join(now_us, event)
            case InstanceLost():
                instance = self._fleet.find(event.ref)
                return [] if instance is None else self._lose(now_us, instance, event.reason)
            case InstanceDraining():
                instance = self._fleet.find(event.ref)
                if instance is not None:
                    self._fleet.mark_draining(instance)
                return []
            case DrainRequested():
                instance = self._fleet.instances.get(event.uuid)
                if instance is None or instance.draining:
                    return []
                self._fleet.mark_draining(instance)
                return [Drain(ref=instance.ref)]
            case InstanceAway() | InstanceReturned() | AttemptsHeld():
                return self._take_connection(now_us, event)

    def _take_connection(self, now_us: int, event: InstanceAway | InstanceReturned | AttemptsHeld) -> list[Decision]:
        """A control stream broke, stands again, or told what its instance has."""
        instance = self._fleet.find(event.ref)
        if instance is None:
            return []
        match event:
            case InstanceAway():
                instance.set_aside(now_us + event.away_us)
            case InstanceReturned():
                instance.set_aside(0)
                self._reconnections.begin(event.ref)
            case AttemptsHeld():
                return self._reconnections.compare(instance, event.attempts)
        return []

    def take_kv(self, batch: KvEventBatch, now_us: int) -> None:
        if self._fleet.find(batch.ref) is not None:
            applied = self._index.apply(batch)
            self._follow(batch.ref.uuid, applied, now_us)
            if applied is Applied.APPLIED:
                self._note_evictions(batch)

    def take_load(self, report: LoadReport, now_us: int) -> None:
        instance = self._fleet.find(report.ref)
        if instance is not None:
            self._follow(report.ref.uuid, self._index.advance(report.ref, report.sequence), now_us)
            instance.take_report(report)
            if report.draining and not instance.draining:
                self._fleet.mark_draining(instance)

    def _note_evictions(self, batch: KvEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlocksRemoved):
                last = [block for block in event.hashes if not self._index.is_held(block)]
                self._reuse.note_evicted(event.hashes, last, self._index.entries())

    def resyncs(self, now_us: int) -> list[Decision]:
        return [
            Resync(ref=self._fleet.instances[uuid].ref, sequence_seen=self._index.sequence_applied(uuid))
            for uuid in self._resyncs.take_due(now_us)
        ]

    def next_resync(self) -> int | None:
        return self._resyncs.next_due()

    def hold_off(self, now_us: int, attempt: Attempt, reporter: Instance) -> None:
        """A refusal is back-pressure. P also reports what D refused, maybe before D does: then both get a pause."""
        for ref in attempt.sides() if reporter.ref == attempt.prefill else [attempt.decode]:
            instance = self._fleet.find(ref)
            if instance is not None:
                instance.refuse(now_us)

    def blame(self, now_us: int, attempt: Attempt, instance: Instance) -> None:
        """A failure counts against its reporter and, during a hand-off, against the pair: whichever is to blame will
        go on failing while the other one recovers with other partners."""
        self._health.fail(now_us, instance.uuid)
        if attempt.prefill is not None and attempt.prefill in attempt.live_sides():
            self._health.fail(now_us, attempt.prefill.uuid, attempt.decode.uuid)

    def credit(self, now_us: int, attempt: Attempt, reporter: InstanceRef, kind: OutcomeKind) -> None:
        instance = self._fleet.find(reporter)
        if instance is None:
            return
        if kind is OutcomeKind.GRANTED:
            instance.grant()
        if kind in SUCCESSES:
            instance.succeed()
            self._health.succeed(now_us, reporter.uuid)
        if kind is OutcomeKind.HANDOFF_COMPLETE and attempt.prefill is not None:
            self._health.succeed(now_us, attempt.prefill.uuid, attempt.decode.uuid)

    def _join(self, now_us: int, event: InstanceJoined) -> list[Decision]:
        ref = event.manifest.ref
        decisions: list[Decision] = []
        present = self._fleet.instances.get(ref.uuid)
        if present is not None:
            if present.ref.incarnation > ref.incarnation:
                return []
            decisions += self._lose(now_us, present, "replaced by a new registration")
        decisions += [
            CancelAttempt(ref=ref, key=key, reason="the connection was lost") for key in self._orphans.pop(ref, ())
        ]
        self._fleet.add(Instance(event.manifest, now_us))
        self._index.join(ref)
        return decisions

    def _lose(self, now_us: int, instance: Instance, reason: str) -> list[Decision]:
        decisions: list[Decision] = []
        failed = self._attempts.depending_on(instance.ref)
        for attempt in failed:
            decisions += self._attempts.end(attempt, "the other side was lost", told=instance.ref)
            decisions.append(AttemptFailed(key=attempt.key, reason=f"{instance.manifest.name} was lost: {reason}"))
        if failed:
            self._remember_orphans(instance.ref, [attempt.key for attempt in failed])
        if not instance.draining:
            self._health.fail(now_us, instance.uuid)
        self._fleet.remove(instance)
        self._index.leave(instance.uuid)
        self._resyncs.settle(instance.uuid)
        self._reconnections.drop(instance.ref)
        return decisions

    def _remember_orphans(self, ref: InstanceRef, keys: list[AttemptRef]) -> None:
        if len(self._orphans) >= ORPHANED_INSTANCES_MAX:
            del self._orphans[next(iter(self._orphans))]
        self._orphans[ref] = keys

    def _follow(self, uuid: str, applied: Applied, now_us: int) -> None:
        if self._index.is_believed(uuid):
            self._resyncs.settle(uuid)
        elif applied is Applied.GAP:
            self._resyncs.want(uuid, now_us)
