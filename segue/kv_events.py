"""KV events and load reports: what instances publish about themselves, one publisher to many conductors.

Every message carries (instance uuid, incarnation, sequence). The sequence starts at 1 and counts published messages,
so a reader notices a gap or a new incarnation and asks for a snapshot; it never guesses. A snapshot replaces all that
was believed of the instance.
"""

from __future__ import annotations

import msgspec

from segue.ids import InstanceRef


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """`hashes` (16 bytes each) form a chain whose first parent is `parent` (b"" for a root)."""

    parent: bytes
    hashes: list[bytes]
    tier: str = "gpu"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    hashes: list[bytes]
    tier: str = "gpu"


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """Everything this instance said before is void (cache reset, or the start of a snapshot)."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, tag="kv", array_like=True):
    ref: InstanceRef
    sequence: int
    events: list[KvEvent]
    snapshot: bool = False
    """True: starts with BlocksCleared and holds, or begins, everything the instance has."""


class LoadReport(msgspec.Struct, frozen=True, tag="load", kw_only=True, array_like=True):
    """State of one instance, published at least every second and whenever it changes much."""

    ref: InstanceRef
    sequence: int
    running: int
    waiting: int
    tokens_queued: int
    """Prompt tokens accepted and not yet computed (all conductors' work)."""
    tokens_running: int
    """K/V tokens of running sequences: what a decode step reads."""
    pages_free: int
    pages_active: int
    pages_cached: int
    pages_held: int
    pages_quarantined: int
    pages_total: int
    step_us: int
    """Exponential mean of recent step times."""
    preemptions: int = 0
    draining: bool = False


PublishedMessage = KvEventBatch | LoadReport
