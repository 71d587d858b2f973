"""What a worker core hears and what it decides: the whole interface between the pure cores and the edge.

Every decision that starts work carries an `op` and gets exactly one terminating event: RunPlan -> PlanFinished,
MovePages -> PagesMoved, Fence -> Fenced, OpenLink -> LinkReady | LinkRefused. All records are tagged, so that a live
loop can record `(now, events, decisions)` and a replay can compare.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from segue.handoff_messages import HandoffMessage
from segue.ids import AttemptRef, InstanceRef
from segue.kv_events import KvEvent
from segue.plan import BatchPlan, PlanResult
from segue.worker_messages import Assign, Outcome, Peer, TokenDelta


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """`conductor` is where outcomes of this attempt go."""

    assign: Assign
    conductor: str


class CancelRequested(msgspec.Struct, frozen=True, tag="cancel"):
    """From a Conductor or from the gateway that owns the request. Attempt 0: every attempt."""

    key: AttemptRef
    reason: str


class PeerMessage(msgspec.Struct, frozen=True, tag="peer"):
    message: HandoffMessage


class LinkReady(msgspec.Struct, frozen=True, tag="link"):
    """The pair was checked and the mover can write into the peer's pages."""

    peer: InstanceRef


class LinkRefused(msgspec.Struct, frozen=True, tag="no_link"):
    peer: InstanceRef
    reason: str


class LinkRestored(msgspec.Struct, frozen=True, tag="link_again"):
    """The connection to the peer broke and was made anew: messages either way may have been lost."""

    peer: InstanceRef


class PeerGone(msgspec.Struct, frozen=True, tag="gone"):
    """The peer's process has ended: nothing of it can write any more."""

    peer: InstanceRef


class PlanFinished(msgspec.Struct, frozen=True, tag="plan_finished"):
    result: PlanResult


class PagesMoved(msgspec.Struct, frozen=True, tag="moved"):
    """The first `moved` pages of the op have landed; `error` says why the others did not."""

    op: int
    moved: int
    error: str = ""


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """`proven`: no write of the peer can land any more."""

    op: int
    peer: InstanceRef
    proven: bool


class GatewayLost(msgspec.Struct, frozen=True, tag="gateway_lost"):
    """No token stream to this gateway for a whole lease: nobody reads what its requests produce."""

    gateway: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take nothing new; what runs goes on."""


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The process ends now: tell everybody."""

    reason: str


Event = (
    Assigned
    | CancelRequested
    | PeerMessage
    | LinkReady
    | LinkRefused
    | LinkRestored
    | PeerGone
    | PlanFinished
    | PagesMoved
    | Fenced
    | GatewayLost
    | Drain
    | Stopping
)


class RunPlan(msgspec.Struct, frozen=True, tag="run"):
    plan: BatchPlan


class MovePages(msgspec.Struct, frozen=True, tag="move"):
    """Copy own pages into pages lent by `target`: (source page, target page), in block order."""

    op: int
    target: InstanceRef
    pages: list[tuple[int, int]]
    attempt: AttemptRef


class CancelMove(msgspec.Struct, frozen=True, tag="cancel_move"):
    """Pages of `op` not begun need not be moved; PagesMoved still follows."""

    op: int


class LendPages(msgspec.Struct, frozen=True, tag="lend"):
    """From now on `source` may write just these pages for `attempt`; none: they are taken back."""

    source: InstanceRef
    pages: list[int]
    attempt: AttemptRef


class OpenLink(msgspec.Struct, frozen=True, tag="open"):
    peer: Peer


class SendPeer(msgspec.Struct, frozen=True, tag="send"):
    """Best effort: every message can be lost and is repeated or answered by a timer."""

    message: HandoffMessage


class PushTokens(msgspec.Struct, frozen=True, tag="push"):
    """One message to one gateway."""

    gateway: str
    deltas: list[TokenDelta]


class Report(msgspec.Struct, frozen=True, tag="report"):
    conductor: str
    outcome: Outcome


class PublishKv(msgspec.Struct, frozen=True, tag="publish"):
    events: list[KvEvent]


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Prove that no write of `peer` (for `attempt`, if given) can land any more."""

    op: int
    peer: InstanceRef
    attempt: AttemptRef | None = None


class RestartNeeded(msgspec.Struct, frozen=True, tag="restart"):
    """This instance cannot recover by itself; it takes nothing new and should be replaced."""

    reason: str


Decision = (
    RunPlan
    | MovePages
    | CancelMove
    | LendPages
    | OpenLink
    | SendPeer
    | PushTokens
    | Report
    | PublishKv
    | Fence
    | RestartNeeded
)


class CoreLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a load report says beyond page counts."""

    running: int
    waiting: int
    tokens_queued: int
    tokens_running: int
    preemptions: int
    draining: bool


class WorkerCore(Protocol):
    """A pure machine: events and a time in, decisions out."""

    def step(self, now_us: int, events: list[Event]) -> list[Decision]: ...

    def next_wakeup(self) -> int | None: ...

    def load(self) -> CoreLoad: ...

    def live(self, conductor: str = "") -> list[AttemptRef]:
        """Attempts of which anything is left here: all, or those that one Conductor assigned."""

    def check(self) -> None: ...
