"""The version of everything that Segue's processes say to each other, and what happens when two differ.

The rule: any change of a message between instances, gateways and Conductors raises WIRE_VERSION by one. A test computes
WIRE_DIGEST from the definitions (`tests/test_wire_drift.py`), so that a change without a new version fails, and says
what to write here. Nobody has to judge whether an older peer would misread the change.

Each stream names its version before anything else is read: a worker in its manifest, to a Conductor and to the other
end of a hand-off, and in the metadata of a token stream, to a gateway. What differs is refused with both versions.
Clients of the public API are not concerned: it grows as protobuf and JSON allow.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

WIRE_VERSION = 3

WIRE_DIGEST = "d2192bbd4e0ab585"
"""Of the definitions that WIRE_VERSION names."""

METADATA_KEY = "segue-wire-version"
"""Of a gRPC stream whose messages do not name the version themselves."""


class Versioned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def wire_version(self) -> int: ...


class VersionClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What every version reads of a manifest of any other: these two never change their names or types."""

    name: str = ""
    wire_version: int = 0


def wire_refusal(mine: Versioned, theirs: Versioned) -> str | None:
    """Why these two do not understand each other, or None."""
    if mine.wire_version == theirs.wire_version:
        return None
    return f"wire version differs: {mine.name} has {mine.wire_version}, {theirs.name} has {theirs.wire_version}"
