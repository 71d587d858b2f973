"""What the Conductor core is told. Times are microseconds of the caller's monotonic clock."""

from __future__ import annotations

import msgspec

from segue.ids import AttemptRef, InstanceRef
from segue.kv_events import KvEventBatch, LoadReport
from segue.manifest import InstanceManifest
from segue.worker_messages import Outcome


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived"):
    """One attempt to place. `tokens_known` counts the prompt and the tokens of earlier attempts; `tokens_max` is where
    generation stops at the latest (prompt + max_tokens). The core never sees a token id."""

    request_id: str
    attempt: int
    model: str
    tokens_prompt: int
    tokens_known: int
    tokens_max: int
    hash_root: bytes
    block_hashes: list[bytes]
    kv_root: bytes = b""
    priority: int = 0
    tenant: str = ""
    deadline_us: int = 0
    """Left until the client's deadline, from now; 0: none."""

    @property
    def key(self) -> AttemptRef:
        return AttemptRef(self.request_id, self.attempt)


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The gateway reached the terminal state (also by cancelling): nothing of the request may stay behind."""

    request_id: str
    reason: str


class InstanceJoined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    manifest: InstanceManifest


class InstanceLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    ref: InstanceRef
    reason: str


class InstanceAway(msgspec.Struct, frozen=True, kw_only=True, tag="away"):
    """Its control stream broke. It may come back within `away_us`; until then nothing is assigned to it."""

    ref: InstanceRef
    away_us: int


class InstanceReturned(msgspec.Struct, frozen=True, kw_only=True, tag="returned"):
    """The same incarnation has a control stream again."""

    ref: InstanceRef


class AttemptsHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """What the instance has of the attempts that were assigned before its present control stream."""

    ref: InstanceRef
    attempts: list[AttemptRef]


class InstanceDraining(msgspec.Struct, frozen=True, kw_only=True, tag="draining"):
    """The instance says that it takes no new work."""

    ref: InstanceRef


class DrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag="drain_requested"):
    """An operator, or a scaler, wants the instance to end its work and leave."""

    uuid: str


class LoadReported(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    report: LoadReport


class KvPublished(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    batch: KvEventBatch


class OutcomeReported(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    ref: InstanceRef
    outcome: Outcome


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """Time passed; `next_wakeup` asked for it."""


MembershipEvent = (
    InstanceJoined | InstanceLost | InstanceAway | InstanceReturned | AttemptsHeld | InstanceDraining | DrainRequested
)

Event = (
    RequestArrived
    | RequestFinished
    | InstanceJoined
    | InstanceLost
    | InstanceAway
    | InstanceReturned
    | AttemptsHeld
    | InstanceDraining
    | DrainRequested
    | LoadReported
    | KvPublished
    | OutcomeReported
    | Tick
)
