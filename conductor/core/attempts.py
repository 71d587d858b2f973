"""Routed attempts and what they hold: bookings, expected prefixes, sides that must be told when it ends."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from conductor.core.attempt import Attempt
from conductor.core.decisions import CancelAttempt
from conductor.core.events import RequestArrived
from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.fleet import Fleet
from conductor.core.instance import Instance, Share
from conductor.core.ledger import Ledger
from conductor.core.policy import Choice
from segue.ids import InstanceRef
from segue.worker_messages import OutcomeKind


class Attempts:
    """At most one live attempt per request id."""

    def __init__(self, fleet: Fleet) -> None:
        self.expected = ExpectedPrefixes()
        self._fleet = fleet
        self._ledger = Ledger()
        self._live: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Attempt | None:
        return self._live.get(request_id)

    def start(self, request: RequestArrived, choice: Choice, tokens_growth: int, now_us: int) -> Attempt:
        """Book what `choice` needs; the capacity was checked by the policy in this very step."""
        decode, prefill = choice.decode, choice.prefill
        attempt = Attempt(request, None if prefill is None else prefill.ref, decode.ref)
        pages = decode.pages_missing(request.tokens_known + tokens_growth, choice.held_decode)
        kv_tokens = request.tokens_known + tokens_growth // 2
        computed = Share(choice.tokens_compute, 0, choice.compute_us)
        share = replace(computed if prefill is None else Share(0, 0), pages=pages, kv_tokens=kv_tokens)
        self._ledger.reserve(attempt.key, decode, share, now_us)
        if prefill is not None:
            share = replace(computed, pages=prefill.pages_missing(request.tokens_known, choice.held_prefill))
            self._ledger.reserve(attempt.key, prefill, share, now_us)
        if choice.tokens_compute:
            self.expected.add(attempt.key, (prefill or decode).uuid, request.block_hashes)
        self._live[request.request_id] = attempt
        return attempt

    def report(self, attempt: Attempt, reporter: InstanceRef, kind: OutcomeKind, now_us: int) -> bool:
        """Apply one outcome and release what it frees; False when it was late or repeated."""
        if not attempt.advance(reporter, kind):
            return False
        computing = self._fleet.find(attempt.prefill or attempt.decode)
        if computing is not None:
            if kind is OutcomeKind.PREFILL_STARTED:
                computing.prefill_work.begin(attempt.key, now_us)
            elif kind in (OutcomeKind.PREFILL_DONE, OutcomeKind.HANDOFF_COMPLETE):
                self._ledger.release_tokens(attempt.key, computing, now_us)
        live = attempt.live_sides()
        for ref in attempt.sides():
            if ref not in live:
                self._release(attempt, ref)
        if (attempt.prefill or attempt.decode) not in live:
            self.expected.drop(attempt.key)
        return True

    def end(self, attempt: Attempt, reason: str, told: InstanceRef | None = None) -> list[CancelAttempt]:
        """Forget the attempt. The sides that still hold something are to be told, except `told`, which told us."""
        del self._live[attempt.key.request_id]
        self.expected.drop(attempt.key)
        for ref in attempt.sides():
            self._release(attempt, ref)
        return [
            CancelAttempt(ref=ref, key=attempt.key, reason=reason)
            for ref in attempt.live_sides()
            if ref != told and self._fleet.find(ref) is not None
        ]

    def depending_on(self, ref: InstanceRef) -> list[Attempt]:
        return [attempt for attempt in self._live.values() if attempt.depends_on(ref)]

    def check(self) -> None:
        self._ledger.check(self._fleet.instances)
        booked = set(self._ledger.keys())
        live = {(attempt.key, ref) for attempt in self._live.values() for ref in attempt.live_sides()}
        assert booked == live, "booked capacity is not that of the live sides"
        assert len(self.expected) <= len(self._live), "an expected prefix of no live attempt"

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._live.values())

    def _release(self, attempt: Attempt, ref: InstanceRef) -> None:
        instance: Instance | None = self._fleet.find(ref)
        if instance is None:
            self._ledger.drop(attempt.key, ref)
        else:
            self._ledger.release(attempt.key, instance)
