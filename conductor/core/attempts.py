"""Routed attempts and what they hold: bookings, expected prefixes, sides that must be told when it ends."""

from __future__ import annotations

from collections.abc import Iterator

from conductor.core.attempt import Attempt
from conductor.core.decisions import CancelAttempt
from conductor.core.events import RequestArrived
from conductor.core.fleet import Fleet
from conductor.core.instance import Instance, Share
from conductor.core.ledger import Ledger
from conductor.core.live_chains import LiveChains
from conductor.core.policy import Choice
from segue.ids import InstanceRef
from segue.worker_messages import OutcomeKind


class Attempts:
    """At most one live attempt per request id."""

    def __init__(self, fleet: Fleet) -> None:
        self.expected = LiveChains()
        """Prefixes that are being computed: what the KV events will say in a moment. Without them a burst of siblings
        with one new prefix would spread over all instances, each computing it again."""
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
        self._book(decode, request, choice, choice.held_decode, tokens_growth, now_us, computes=prefill is None)
        if prefill is not None:
            self._book(prefill, request, choice, choice.held_prefill, 0, now_us, computes=True)
        if choice.tokens_compute:
            self.expected.add(attempt.key, (prefill or decode).uuid, request.block_hashes)
        self._live[request.request_id] = attempt
        return attempt

    def _book(
        self,
        instance: Instance,
        request: RequestArrived,
        choice: Choice,
        tokens_held: int,
        tokens_growth: int,
        now_us: int,
        *,
        computes: bool,
    ) -> None:
        pages = instance.pages_for(request.tokens_known + tokens_growth)
        share = Share(
            tokens=choice.tokens_compute if computes else 0,
            pages=max(0, pages - len(request.block_hashes)),
            pages_fresh=pages - tokens_held // instance.block_size,
            compute_us=choice.compute_us if computes else 0.0,
            kv_tokens=request.tokens_known + tokens_growth // 2 if instance is choice.decode else 0,
        )
        self._ledger.reserve(request.key, instance, share, now_us, request.block_hashes)

    @property
    def in_use(self) -> LiveChains:
        """Blocks of live attempts by the instances that have pages for them."""
        return self._ledger.in_use

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
            self._forget_expected(attempt)
        return True

    def end(self, attempt: Attempt, reason: str, told: InstanceRef | None = None) -> list[CancelAttempt]:
        """Forget the attempt. The sides that still hold something are to be told, except `told`, which told us."""
        del self._live[attempt.key.request_id]
        self._forget_expected(attempt)
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
        self.expected.check()
        booked = set(self._ledger.keys())
        live = {(attempt.key, ref) for attempt in self._live.values() for ref in attempt.live_sides()}
        assert booked == live, "booked capacity is not that of the live sides"
        assert len(self.expected) <= len(self._live), "an expected prefix of no live attempt"

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._live.values())

    def _forget_expected(self, attempt: Attempt) -> None:
        self.expected.drop(attempt.key, (attempt.prefill or attempt.decode).uuid)

    def _release(self, attempt: Attempt, ref: InstanceRef) -> None:
        instance: Instance | None = self._fleet.find(ref)
        if instance is None:
            self._ledger.drop(attempt.key, ref)
        else:
            self._ledger.release(attempt.key, instance)
