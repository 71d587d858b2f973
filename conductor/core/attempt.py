"""Life cycle of one attempt, side by side: what the prefill and the decode instance have reported.

Reports of the two sides travel on different streams and arrive in any order; a pair (phase, outcome) that is missing
from the table is late or repeated, and is ignored. REFUSED, FAILED and CANCELLED (nobody asked for it: a request that
its gateway ended is not live any more) end the attempt and are not in the table.

            prefill side                       decode side
    BOOKED -> COMPUTING -> COMPUTED        BOOKED -> GRANTED -> RUNNING
        \\________ENDED________/                \\_____ENDED_____/
"""

from __future__ import annotations

from enum import Enum

from conductor.core.events import RequestArrived
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import OutcomeKind


class Phase(Enum):
    BOOKED = "booked"
    GRANTED = "granted"
    COMPUTING = "computing"
    COMPUTED = "computed"
    RUNNING = "running"
    ENDED = "ended"


_ANY_LIVE_PREFILL = (Phase.BOOKED, Phase.COMPUTING, Phase.COMPUTED)
_ANY_LIVE_DECODE = (Phase.BOOKED, Phase.GRANTED, Phase.RUNNING)

PREFILL: dict[tuple[Phase, OutcomeKind], Phase] = {
    (Phase.BOOKED, OutcomeKind.PREFILL_STARTED): Phase.COMPUTING,
    (Phase.BOOKED, OutcomeKind.PREFILL_DONE): Phase.COMPUTED,
    (Phase.COMPUTING, OutcomeKind.PREFILL_DONE): Phase.COMPUTED,
    **{(phase, OutcomeKind.HANDOFF_COMPLETE): Phase.ENDED for phase in _ANY_LIVE_PREFILL},
    **{(phase, OutcomeKind.EMPTY): Phase.ENDED for phase in _ANY_LIVE_PREFILL},
    **{(phase, OutcomeKind.DONE_AT_P): Phase.ENDED for phase in _ANY_LIVE_PREFILL},
    **{(phase, OutcomeKind.FINISHED): Phase.ENDED for phase in _ANY_LIVE_PREFILL},
}

DECODE: dict[tuple[Phase, OutcomeKind], Phase] = {
    (Phase.BOOKED, OutcomeKind.GRANTED): Phase.GRANTED,
    (Phase.BOOKED, OutcomeKind.PREFILL_DONE): Phase.RUNNING,
    (Phase.GRANTED, OutcomeKind.PREFILL_DONE): Phase.RUNNING,
    (Phase.BOOKED, OutcomeKind.HANDOFF_COMPLETE): Phase.RUNNING,
    (Phase.GRANTED, OutcomeKind.HANDOFF_COMPLETE): Phase.RUNNING,
    (Phase.BOOKED, OutcomeKind.EMPTY): Phase.GRANTED,
    **{(phase, OutcomeKind.DONE_AT_P): Phase.ENDED for phase in _ANY_LIVE_DECODE},
    **{(phase, OutcomeKind.FINISHED): Phase.ENDED for phase in _ANY_LIVE_DECODE},
}

BOTH_SIDES = {OutcomeKind.HANDOFF_COMPLETE, OutcomeKind.EMPTY, OutcomeKind.DONE_AT_P}
"""What one side reports of the hand-off holds for both; any other outcome is about its reporter alone."""


class Attempt:
    """A routed attempt. It lives until the gateway finishes the request or the attempt fails; sides may end before."""

    __slots__ = ("decode", "decode_phase", "finisher", "handed_off", "prefill", "prefill_phase", "request")

    def __init__(self, request: RequestArrived, prefill: InstanceRef | None, decode: InstanceRef) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.prefill_phase = Phase.ENDED if prefill is None else Phase.BOOKED
        self.decode_phase = Phase.BOOKED
        self.handed_off = False
        self.finisher: InstanceRef | None = None
        """Who reported the end; its last tokens may still be on their way to the gateway."""

    @property
    def key(self) -> AttemptRef:
        return self.request.key

    def involves(self, ref: InstanceRef) -> bool:
        return ref in (self.prefill, self.decode)

    def sides(self) -> list[InstanceRef]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    def live_sides(self) -> list[InstanceRef]:
        """Instances that still hold something of it."""
        sides = []
        if self.prefill is not None and self.prefill_phase is not Phase.ENDED:
            sides.append(self.prefill)
        if self.decode_phase is not Phase.ENDED:
            sides.append(self.decode)
        return sides

    def depends_on(self, ref: InstanceRef) -> bool:
        """Whether losing `ref` ends the attempt: a side still live there, or its last words not yet delivered."""
        return ref in self.live_sides() or ref == self.finisher

    def advance(self, reporter: InstanceRef, kind: OutcomeKind) -> bool:
        """Apply one report; False when it changes nothing (late, repeated)."""
        both = kind in BOTH_SIDES
        moved = False
        if both or reporter == self.prefill:
            phase = PREFILL.get((self.prefill_phase, kind))
            moved = phase is not None
            self.prefill_phase = phase or self.prefill_phase
        if both or reporter == self.decode:
            phase = DECODE.get((self.decode_phase, kind))
            moved = moved or phase is not None
            self.decode_phase = phase or self.decode_phase
        if moved and kind in (OutcomeKind.FINISHED, OutcomeKind.DONE_AT_P):
            self.finisher = reporter
        return moved
