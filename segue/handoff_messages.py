"""Messages between a prefill and a decode instance on the connector's control channel: tagged msgpack arrays.

Every message names both ends by incarnation, so that one that was meant for, or sent by, a predecessor at the same
address is recognised. Messages about an attempt are idempotent: a receiver may see any of them twice, late or never.
Block numbers count from the start of the sequence.
"""

from __future__ import annotations

import msgspec

from segue.errors import SegueError
from segue.ids import AttemptRef, InstanceRef
from segue.manifest import InstanceManifest
from segue.plan import TokenLogprobs
from segue.wire_version import WIRE_VERSION, VersionClaim


class SegmentDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a target offers to sources. `nonce` stands at `nonce_offset`: reading it proves a right mapping."""

    mover: str
    location: str
    pages: int
    page_bytes: int
    nonce_offset: int
    nonce: bytes


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process on one machine. `start_ticks` tells a process from a later one with the same pid;
    `pid_space` names the boot and the pid namespace that the pid belongs to."""

    pid_space: str
    pid: int
    start_ticks: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of each side. The receiver compares manifests (`pairing_refusal`)."""

    source: InstanceRef
    manifest: InstanceManifest
    process: ProcessIdentity
    asked: InstanceRef
    """Whom the first of the two has dialled. Somebody else may answer at that address, and then refuses."""
    is_answer: bool = False
    offers: list[SegmentDescriptor] = []
    """Ways to write the target's pages, best first."""
    refusal: str = ""
    """Answer only: why the pair must not be used."""


class ForeignHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """What can be read of a Hello of another wire version: enough to refuse it by name."""

    source: InstanceRef
    manifest: VersionClaim


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """What every message about an attempt starts with."""

    request_id: str
    attempt: int
    source: InstanceRef
    target: InstanceRef

    @property
    def key(self) -> AttemptRef:
        return AttemptRef(self.request_id, self.attempt)


class GrantRequest(Attempt, frozen=True, array_like=True, tag="grant?"):
    """P is within one chunk of starting and asks for pages."""


class Grant(Attempt, frozen=True, array_like=True, tag="grant"):
    """`pages[i]` takes block `first_block + i`; D has the blocks before. The lease is renewed by heartbeats."""

    pages: list[int]
    first_block: int
    lease_us: int


class Empty(Attempt, frozen=True, array_like=True, tag="empty"):
    """D computes the rest itself: P is let go."""


class Refuse(Attempt, frozen=True, array_like=True, tag="refuse"):
    reason: str


class PagesSent(Attempt, frozen=True, array_like=True, tag="pages"):
    """Blocks `first_block .. first_block + count - 1` have landed at the target."""

    first_block: int
    count: int


class PrefillDone(Attempt, frozen=True, array_like=True, tag="done"):
    """P writes no more. Blocks before `blocks_valid` have landed (all of `blocks_total`, unless a page failed)."""

    first_token: int
    logprobs: TokenLogprobs | None
    blocks_total: int
    blocks_valid: int


class DoneAtP(Attempt, frozen=True, array_like=True, tag="done_at_p"):
    """The first token ended the request; P writes no more."""

    finish: str


class Abort(Attempt, frozen=True, array_like=True, tag="abort"):
    """The sender gives up. From P it also says that P writes no more: it is sent after the last write ended."""

    reason: str


class AbortAck(Attempt, frozen=True, array_like=True, tag="aborted"):
    """The sender has stopped and, if it is P, writes no more for this attempt."""


class Complete(Attempt, frozen=True, array_like=True, tag="complete"):
    """D holds every page; P may forget the attempt."""


class Stale(Attempt, frozen=True, array_like=True, tag="stale"):
    """The answer to a message about an attempt that the sender does not have (ended, or another incarnation)."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Attempts with `target` that the sender still has a use for; P's list renews the leases of those, and only those.

    `said_us` is the sender's clock, `heard_us` the latest `said_us` of the target that had reached it: so a receiver
    knows which of its own words the list takes into account, also where messages are lost, late or out of order. 0 is
    none.
    """

    source: InstanceRef
    target: InstanceRef
    live: list[AttemptRef]
    said_us: int = 0
    heard_us: int = 0


AttemptMessage = (
    GrantRequest | Grant | Empty | Refuse | PagesSent | PrefillDone | DoneAtP | Abort | AbortAck | Complete | Stale
)
HandoffMessage = AttemptMessage | Heartbeat
ControlMessage = HandoffMessage | Hello
HeardMessage = ControlMessage | ForeignHello


class MalformedMessage(SegueError):
    """A peer sent bytes that are no message of this version."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_foreign_decoder = msgspec.msgpack.Decoder(ForeignHello)


def encode_message(message: ControlMessage) -> bytes:
    return _encoder.encode(message)


def decode_message(raw: bytes) -> HeardMessage:
    """Raises MalformedMessage for anything but one well-formed message, or a Hello of another version."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return _foreign_hello(raw, error)


def _foreign_hello(raw: bytes, reason: Exception) -> ForeignHello:
    """Raises MalformedMessage for the first `reason` when it is none."""
    try:
        hello = _foreign_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise MalformedMessage(str(reason)) from reason
    if hello.manifest.wire_version == WIRE_VERSION:
        raise MalformedMessage(str(reason)) from reason
    return hello
