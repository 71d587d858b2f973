"""Which assignments are turned down at once, and what is answered about attempts that are not here."""

from __future__ import annotations

from segue import handoff_messages as wire
from segue.handoff import Tombstones
from segue.ids import InstanceRef, absence
from segue.worker_messages import OutcomeKind
from worker_runtime.events import Assigned, SendPeer
from worker_runtime.outbox import Outbox


def refusal_of(
    event: Assigned, tombstones: Tombstones, now_us: int, *, draining: bool, tokens_max: int
) -> tuple[OutcomeKind, str] | None:
    """Why an assignment is not taken: cancelled before it came, draining, or too long for this instance."""
    reason = tombstones.reason(event.assign.key, now_us)
    if reason is not None:
        return OutcomeKind.CANCELLED, reason
    if draining:
        return OutcomeKind.REFUSED, "draining"
    tokens = len(event.assign.token_ids) // 4
    if not 0 < tokens < tokens_max:
        return OutcomeKind.REFUSED, f"{tokens} tokens, this instance takes 1 to {tokens_max - 1}"
    return None


class Strangers:
    """Answers messages about attempts that have ended, never came, or belong to another incarnation.

    Stale tells the sender to let go: this instance has nothing of the attempt and writes nothing for it. An Abort of an
    unknown attempt is confirmed and remembered, so that an Assign that comes later does not start it. Only messages of
    the `expected` kinds need a Stale.
    """

    def __init__(self, ref: InstanceRef, tombstones: Tombstones, out: Outbox, expected: tuple[type, ...]) -> None:
        self._ref = ref
        self._expected = expected
        self._tombstones = tombstones
        self._out = out

    def answer(self, message: wire.AttemptMessage, now_us: int, *, known: bool) -> None:
        """`known`: the attempt is here, with another peer."""
        end = (message.request_id, message.attempt, self._ref, message.source)
        if message.target != self._ref:
            if not isinstance(message, wire.Stale | wire.AbortAck):
                self._out.add(SendPeer(wire.Stale(*end, absence(message.target, self._ref))))
        elif isinstance(message, wire.Abort) and not known:
            self._tombstones.bury(message.key, message.reason, now_us)
            self._out.add(SendPeer(wire.AbortAck(*end)))
        elif isinstance(message, self._expected):
            reason = self._tombstones.reason(message.key, now_us)
            self._out.add(SendPeer(wire.Stale(*end, reason or "unknown attempt")))
