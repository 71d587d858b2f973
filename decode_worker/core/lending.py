"""Pages lent to prefill instances: in which order they are granted, and how they come back.

A grant reserves all pages of a prompt: D's own cached prefix and fresh ones, which P may write until it has said that
it writes no more. Lent pages come back in three ways: they become a block table (`planner.land`), they are given back
because P is known to have stopped, or they are quarantined until it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from decode_worker.core.attempt import DecodeAttempt
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner
from segue.block_pool import BlockPool
from segue.handoff import EARLY_MESSAGES_MAX, DecodeEvent, DecodeState, HandoffTiming
from segue.ids import AttemptRef
from segue.worker_messages import OutcomeKind
from worker_runtime.events import Fence, Fenced, LendPages, RestartNeeded
from worker_runtime.outbox import Outbox

ENDING = (DecodeState.ABORTING, DecodeState.QUARANTINED)

QUARANTINED_PERCENT_MAX = 5
"""More than this, unproven for a whole lease, is not coming back by itself."""


class Lender:
    """Reservations of one decode instance. It changes the states between GRANTED and FREED that lending is about."""

    def __init__(self, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming, out: Outbox) -> None:
        self._planner = planner
        self._pool = pool
        self._timing = timing
        self._out = out
        self._asking: OrderedDict[AttemptRef, DecodeAttempt] = OrderedDict()
        self._fences: dict[int, tuple[DecodeAttempt, bool]] = {}
        """Outstanding op -> (attempt, whether it is about the attempt's pages alone)."""
        self._fence_next = 1
        self.restart_asked = False

    # -- granting

    def ask(self, attempt: DecodeAttempt, now_us: int) -> None:
        """P waits for pages; asked again, it keeps its place."""
        if attempt.asked_us is None:
            attempt.asked_us = now_us
            self._asking[attempt.key] = attempt

    def asking(self) -> list[DecodeAttempt]:
        """BOOKED attempts whose P waits for pages, in order of asking."""
        return list(self._asking.values())

    def withdraw(self, attempt: DecodeAttempt) -> None:
        self._asking.pop(attempt.key, None)

    def lacks_at_most_a_block(self, attempt: DecodeAttempt) -> bool:
        size = self._pool.block_size
        scores = attempt.assign.sampling.prompt_logprobs is not None  # takes the logits of every position
        cached = 0 if scores else len(self._pool.match(attempt.hashes))
        return len(attempt.tokens) - cached * size <= size

    def grant(self, attempt: DecodeAttempt, now_us: int) -> bool:
        """Reserve every page of the prompt and say so; False when there is no room now."""
        reservation = self._planner.reserve(attempt.seq, len(attempt.tokens), attempt.hashes)
        if reservation is None:
            return False
        peer = attempt.peer
        assert peer is not None
        self.withdraw(attempt)
        attempt.reservation = reservation
        attempt.lease_until_us = now_us + self._timing.lease_us
        attempt.handoff.advance(DecodeEvent.GRANT)
        self._out.add(LendPages(peer, reservation.pages_new, attempt.key))
        self.say_grant(attempt)
        tokens_cached = len(reservation.pages_cached) * self._pool.block_size
        self._out.report(attempt, OutcomeKind.GRANTED, tokens_cached=tokens_cached)
        return True

    def say_grant(self, attempt: DecodeAttempt) -> None:
        assert attempt.reservation is not None
        pages, first_block = attempt.reservation.pages_new, len(attempt.reservation.pages_cached)
        self._out.say(attempt, wire.Grant, pages, first_block, self._timing.lease_us)

    def renew(self, attempts: Mapping[AttemptRef, DecodeAttempt], beat: wire.Heartbeat, now_us: int) -> int:
        """The leases of those that P names; how many of them are not here, or not with this P."""
        unknown = 0
        for key in beat.live:
            attempt = attempts.get(key)
            if attempt is None or attempt.peer != beat.source:
                unknown += 1
            else:
                attempt.lease_until_us = now_us + self._timing.lease_us
        return unknown

    # -- taking back

    def take_back(self, attempt: DecodeAttempt) -> None:
        """P may write no more. A mover that can refuse writes does so from now on, also late ones on their way."""
        if attempt.peer is not None:
            self._out.add(LendPages(attempt.peer, [], attempt.key))

    def give_back(self, attempt: DecodeAttempt) -> None:
        """Return reserved pages, if any, that nobody can write any more."""
        if attempt.reservation is not None:
            self.take_back(attempt)
            self._planner.reservation_abort(attempt.reservation, quarantine=False)
            attempt.reservation = None

    def quarantine(self, attempt: DecodeAttempt, reason: str, now_us: int) -> None:
        """P may still write: nobody gets these pages, P is told to stop, and the mover is asked whether it can."""
        assert attempt.reservation is not None
        self.take_back(attempt)
        self._planner.reservation_abort(attempt.reservation, quarantine=True)
        attempt.handoff.advance(DecodeEvent.ABORT)
        attempt.ended_reason = reason
        attempt.lease_until_us = now_us + self._timing.lease_us
        self._say_abort(attempt, now_us)
        self._fence(attempt, attempt.key)

    def recover(self, attempt: DecodeAttempt) -> None:
        """It is proven that nothing can land any more: quarantined pages are free again."""
        if attempt.reservation is not None:
            self._pool.unquarantine(attempt.reservation.pages_new)
            attempt.reservation = None

    def chase(self, attempt: DecodeAttempt, now_us: int) -> None:
        """Ask again for the end of writes; after a lease without answer let the mover prove it."""
        if now_us - attempt.said_us < self._timing.repeat_us:
            return
        self._say_abort(attempt, now_us)
        if now_us < attempt.lease_until_us or attempt.peer is None:
            return
        if attempt.state is DecodeState.ABORTING:
            attempt.handoff.advance(DecodeEvent.SILENT)
        self._fence(attempt, None)
        self._ask_for_restart()

    def _fence(self, attempt: DecodeAttempt, scope: AttemptRef | None) -> None:
        assert attempt.peer is not None
        op, self._fence_next = self._fence_next, self._fence_next + 1
        self._fences[op] = (attempt, scope is not None)
        self._out.add(Fence(op, attempt.peer, scope))

    def fenced(self, event: Fenced) -> DecodeAttempt | None:
        """The attempt that this fence proves to be over, if it still waits for that.

        Where only its pages are proven safe they are free at once, but the attempt goes on waiting for P's word: P may
        still compute for it."""
        attempt, pages_alone = self._fences.pop(event.op, (None, False))
        if attempt is None or not event.proven or attempt.state not in ENDING:
            return None
        if pages_alone:
            self.recover(attempt)
            return None
        return attempt

    def _say_abort(self, attempt: DecodeAttempt, now_us: int) -> None:
        attempt.said_us = now_us
        self._out.say(attempt, wire.Abort, attempt.ended_reason)

    def _ask_for_restart(self) -> None:
        counts = self._pool.counts()
        if not self.restart_asked and counts.quarantined * 100 > counts.total * QUARANTINED_PERCENT_MAX:
            self.restart_asked = True
            self._out.add(RestartNeeded(f"{counts.quarantined} of {counts.total} pages are quarantined"))


class EarlyRequests:
    """Grant requests that overtook their Assign on another socket: each is kept for one lease."""

    def __init__(self, lease_us: int) -> None:
        self._lease_us = lease_us
        self._requests: OrderedDict[AttemptRef, tuple[int, wire.GrantRequest]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def keep(self, message: wire.GrantRequest, now_us: int) -> None:
        if message.key not in self._requests:
            self._requests[message.key] = (now_us + self._lease_us, message)
        if len(self._requests) > EARLY_MESSAGES_MAX:
            self._requests.popitem(last=False)

    def take(self, attempt: DecodeAttempt) -> wire.GrantRequest | None:
        """The request of this attempt's own prefill instance, if it came before."""
        _, message = self._requests.pop(attempt.key, (0, None))
        return message if message is not None and message.source == attempt.peer else None

    def expire(self, now_us: int) -> list[wire.GrantRequest]:
        """Requests whose Assign never came: their senders must be told, or they ask on and keep others waiting."""
        expired = []
        while self._requests and next(iter(self._requests.values()))[0] <= now_us:
            expired.append(self._requests.popitem(last=False)[1][1])
        return expired
