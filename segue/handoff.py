"""Hand-off of one attempt from a prefill instance (P) to a decode instance (D): two local tables and their product.

Who owns what. D allocates the pages of its pool and lends them to P by a grant. From the grant until P has said that it
writes no more (PrefillDone, DoneAtP, Abort, AbortAck; or its process is gone) those pages are writable by a remote: no
batch may read them, nor may they be given to anyone else. P keeps its source pages until its own mover is done.

Each side acts on its own table alone; messages may be lost, repeated, reordered or late, and each side may restart:

    P  PLANNED -> COMPUTING -> SENDING -> SENT -> RELEASED
    D  BOOKED -> GRANTED -> RECEIVING -> COMPLETE -> RUNNING -> FREED
    either  -> ABORTING -> QUARANTINED -> FREED

ABORTING waits for the partner (or the own mover) to confirm that writes have ended; QUARANTINED is the same after a
lease without that answer, when only the mover's fence can tell. `JOINT` says which pairs of states can exist at one
instant; it is what tests and the simulator check, and its heart is: while P computes or sends, D holds the pages.

Leases are durations on the granter's clock. A holder stops at 80 % of the duration, counted from when it last heard
the granter, so that two clocks need not agree and a message may take a fifth of a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

import msgspec

from segue.errors import InternalError
from segue.ids import AttemptRef

TOMBSTONES_MAX = 65_536
"""Ended attempts remembered for one lease: 10 s at 6,500 requests a second; about 10 MB."""

EARLY_MESSAGES_MAX = 1024
"""Grant requests that overtook their Assign (another socket); each waits at most one lease."""

HOLDER_PERCENT = 80


class PrefillState(Enum):
    PLANNED = "planned"
    """Waits for its turn and for D's grant; nothing is computed."""
    COMPUTING = "computing"
    """Granted; no page has been handed to the mover yet."""
    SENDING = "sending"
    SENT = "sent"
    """Every page landed and PrefillDone is out; source pages are cache again, the record can repeat PrefillDone."""
    RELEASED = "released"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"
    FREED = "freed"


class PrefillEvent(Enum):
    GRANTED = "granted"
    FIRST_PAGES = "first_pages"
    ALL_MOVED = "all_moved"
    ACKNOWLEDGED = "acknowledged"
    LET_GO = "let_go"
    """D needs nothing of P: EMPTY or REFUSE before computing; finished by the first token after it."""
    ABORT = "abort"
    SILENT = "silent"
    FENCED = "fenced"


class DecodeState(Enum):
    BOOKED = "booked"
    GRANTED = "granted"
    """Pages are reserved and writable by P."""
    RECEIVING = "receiving"
    COMPLETE = "complete"
    """Every page landed: no longer writable by P, not yet in a batch."""
    RUNNING = "running"
    FREED = "freed"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"


class DecodeEvent(Enum):
    GRANT = "grant"
    FIRST_PAGES = "first_pages"
    ALL_LANDED = "all_landed"
    JOIN = "join"
    LOCAL = "local"
    """D prefills itself: no P was planned, or P is not worth its message (EMPTY)."""
    END = "end"
    """Nothing of it remains: finished, cancelled without lent pages, or P confirmed that it writes no more."""
    ABORT = "abort"
    SILENT = "silent"
    FENCED = "fenced"


PREFILL_TABLE: Mapping[tuple[PrefillState, PrefillEvent], PrefillState] = {
    (PrefillState.PLANNED, PrefillEvent.GRANTED): PrefillState.COMPUTING,
    (PrefillState.PLANNED, PrefillEvent.LET_GO): PrefillState.RELEASED,
    (PrefillState.PLANNED, PrefillEvent.ABORT): PrefillState.ABORTING,
    (PrefillState.COMPUTING, PrefillEvent.FIRST_PAGES): PrefillState.SENDING,
    (PrefillState.COMPUTING, PrefillEvent.LET_GO): PrefillState.RELEASED,
    (PrefillState.COMPUTING, PrefillEvent.ABORT): PrefillState.ABORTING,
    (PrefillState.SENDING, PrefillEvent.ALL_MOVED): PrefillState.SENT,
    (PrefillState.SENDING, PrefillEvent.LET_GO): PrefillState.RELEASED,
    (PrefillState.SENDING, PrefillEvent.ABORT): PrefillState.ABORTING,
    (PrefillState.SENT, PrefillEvent.ACKNOWLEDGED): PrefillState.RELEASED,
    (PrefillState.SENT, PrefillEvent.ABORT): PrefillState.ABORTING,
    (PrefillState.ABORTING, PrefillEvent.FENCED): PrefillState.FREED,
    (PrefillState.ABORTING, PrefillEvent.SILENT): PrefillState.QUARANTINED,
    (PrefillState.QUARANTINED, PrefillEvent.FENCED): PrefillState.FREED,
}

DECODE_TABLE: Mapping[tuple[DecodeState, DecodeEvent], DecodeState] = {
    (DecodeState.BOOKED, DecodeEvent.GRANT): DecodeState.GRANTED,
    (DecodeState.BOOKED, DecodeEvent.LOCAL): DecodeState.RUNNING,
    (DecodeState.BOOKED, DecodeEvent.END): DecodeState.FREED,
    (DecodeState.GRANTED, DecodeEvent.FIRST_PAGES): DecodeState.RECEIVING,
    (DecodeState.GRANTED, DecodeEvent.END): DecodeState.FREED,
    (DecodeState.GRANTED, DecodeEvent.ABORT): DecodeState.ABORTING,
    (DecodeState.RECEIVING, DecodeEvent.ALL_LANDED): DecodeState.COMPLETE,
    (DecodeState.RECEIVING, DecodeEvent.END): DecodeState.FREED,
    (DecodeState.RECEIVING, DecodeEvent.ABORT): DecodeState.ABORTING,
    (DecodeState.COMPLETE, DecodeEvent.JOIN): DecodeState.RUNNING,
    (DecodeState.COMPLETE, DecodeEvent.END): DecodeState.FREED,
    (DecodeState.RUNNING, DecodeEvent.END): DecodeState.FREED,
    (DecodeState.ABORTING, DecodeEvent.FENCED): DecodeState.FREED,
    (DecodeState.ABORTING, DecodeEvent.SILENT): DecodeState.QUARANTINED,
    (DecodeState.QUARANTINED, DecodeEvent.FENCED): DecodeState.FREED,
}

_P, _D = PrefillState, DecodeState
_ENDING = frozenset({_D.ABORTING, _D.QUARANTINED})
_HOLDING = frozenset({_D.GRANTED, _D.RECEIVING})

JOINT: Mapping[PrefillState, frozenset[DecodeState]] = {
    # D may run it locally (EMPTY) or have ended it before P hears; it may have granted while the grant travels.
    _P.PLANNED: frozenset({_D.BOOKED, _D.GRANTED, _D.RUNNING, _D.FREED}) | _ENDING,
    # Nothing is computed or sent unless D holds the pages: never BOOKED, never FREED.
    _P.COMPUTING: frozenset({_D.GRANTED}) | _ENDING,
    _P.SENDING: _HOLDING | _ENDING,
    _P.SENT: _HOLDING | _ENDING | {_D.COMPLETE, _D.RUNNING, _D.FREED},
    # LET_GO at P while DoneAtP travels: D still holds. After Empty, Refuse or Complete D is ahead.
    _P.RELEASED: _HOLDING | _ENDING | {_D.COMPLETE, _D.RUNNING, _D.FREED},
    # P may be told to stop in any state of D; only what D has freed must not be written, which FENCED proves.
    _P.ABORTING: _HOLDING | _ENDING | {_D.BOOKED, _D.COMPLETE, _D.RUNNING, _D.FREED},
    _P.QUARANTINED: _HOLDING | _ENDING | {_D.BOOKED, _D.COMPLETE, _D.RUNNING, _D.FREED},
    _P.FREED: frozenset(_D),
}
"""For each state of P, the states that D can be in at that instant, both processes alive."""

PREFILL_FINAL = frozenset({PrefillState.RELEASED, PrefillState.FREED})
DECODE_FINAL = frozenset({DecodeState.FREED})

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Handoff(Generic[S, E]):
    """One side's state. The only way to change it is `advance`; an illegal event is our bug and leaves it unchanged."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Mapping[tuple[S, E], S], state: S) -> None:
        self._table = table
        self.state = state

    def can(self, event: E) -> bool:
        return (self.state, event) in self._table

    def advance(self, event: E) -> S:
        """Raises InternalError when the table has no such transition."""
        following = self._table.get((self.state, event))
        if following is None:
            raise InternalError(f"hand-off: {event} in {self.state}")
        self.state = following
        return following


def prefill_handoff() -> Handoff[PrefillState, PrefillEvent]:
    return Handoff(PREFILL_TABLE, PrefillState.PLANNED)


def decode_handoff() -> Handoff[DecodeState, DecodeEvent]:
    return Handoff(DECODE_TABLE, DecodeState.BOOKED)


def holder_share_us(lease_us: int) -> int:
    """How long a holder may act on a lease of this duration."""
    return lease_us * HOLDER_PERCENT // 100


class HandoffTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one instance, all derived from the lease it grants."""

    lease_us: int

    @property
    def holder_us(self) -> int:
        """When a holder of the lease stops, after it last heard the granter."""
        return holder_share_us(self.lease_us)

    @property
    def heartbeat_us(self) -> int:
        """Three may be lost before a holder stops."""
        return self.lease_us // 5

    @property
    def repeat_us(self) -> int:
        """Unanswered messages are said again after this."""
        return self.lease_us // 8

    @property
    def grant_wait_us(self) -> int:
        """A grant request that finds no room is refused after this, and the Conductor plans again."""
        return self.lease_us // 2


class Tombstones:
    """Attempts that have ended, or were cancelled before they began, remembered for one lease.

    Attempt 0 buries every attempt of a request. At most `tombstones_max`: the oldest is forgotten first, after which a
    message about it is merely unknown.
    """

    def __init__(self, lease_us: int, tombstones_max: int = TOMBSTONES_MAX) -> None:
        self._lease_us = lease_us
        self._tombstones_max = tombstones_max
        self._until: OrderedDict[AttemptRef, tuple[int, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def bury(self, key: AttemptRef, reason: str, now_us: int) -> None:
        self._until.pop(key, None)
        self._until[key] = (now_us + self._lease_us, reason)
        while len(self._until) > self._tombstones_max:
            self._until.popitem(last=False)

    def reason(self, key: AttemptRef, now_us: int) -> str | None:
        """Why the attempt is dead, or None when nothing is known of it."""
        self._expire(now_us)
        for candidate in (key, AttemptRef(key.request_id, 0)):
            entry = self._until.get(candidate)
            if entry is not None:
                return entry[1]
        return None

    def _expire(self, now_us: int) -> None:
        while self._until:
            key, (until_us, _) = next(iter(self._until.items()))
            if until_us > now_us:
                return
            del self._until[key]
