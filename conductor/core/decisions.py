"""What the Conductor core wants done. The edge carries each one out exactly once, in order."""

from __future__ import annotations

import msgspec

from segue.errors import (
    DeadlineExceeded,
    InvalidField,
    Overloaded,
    RequestError,
    Unavailable,
    UnknownModel,
)
from segue.ids import AttemptRef, InstanceRef


class Route(msgspec.Struct, frozen=True, kw_only=True, tag="route"):
    """Assign the attempt to both instances. `prefill` None: the decode instance prefills locally."""

    key: AttemptRef
    prefill: InstanceRef | None
    decode: InstanceRef
    tokens_cached_expected: int
    """Prompt tokens that the computing instance should find in its cache, fetched ones included."""
    source: InstanceRef | None = None
    """Where the computing instance is to fetch `tokens_fetched` tokens of the prefix from, behind its own."""
    tokens_fetched: int = 0


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag="reject"):
    """The request cannot be served; `code` is that of `segue.errors`."""

    key: AttemptRef
    code: str
    message: str
    field: str = ""
    resource: str = ""
    retry_after_ms: int = 0


class AttemptFailed(msgspec.Struct, frozen=True, kw_only=True, tag="attempt_failed"):
    """This attempt is over and holds nothing any more; the gateway may plan a new one."""

    key: AttemptRef
    reason: str


class HandoffComplete(msgspec.Struct, frozen=True, kw_only=True, tag="handoff_complete"):
    key: AttemptRef


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Tell `ref` to let go of the attempt."""

    ref: InstanceRef
    key: AttemptRef
    reason: str


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """Ask `ref` to say again what follows `sequence_seen`; 0: everything."""

    ref: InstanceRef
    sequence_seen: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    ref: InstanceRef


Decision = Route | Reject | AttemptFailed | HandoffComplete | CancelAttempt | Resync | Drain


def request_error(reject: Reject) -> RequestError:
    """The error that a gateway shows for `reject`."""
    if reject.code == InvalidField.code:
        return InvalidField(reject.field, reject.message)
    if reject.code == Overloaded.code:
        return Overloaded(reject.message, resource=reject.resource, retry_after_ms=reject.retry_after_ms)
    simple: dict[str, type[RequestError]] = {kind.code: kind for kind in (Unavailable, UnknownModel, DeadlineExceeded)}
    return simple[reject.code](reject.message)
