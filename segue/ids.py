"""Identities that cross process boundaries.

A request keeps its id for life; every time it is planned onto instances it gets a new *attempt* (1, 2, ...), and every
message about it names the attempt, so that a late message of an earlier plan is recognised as stale. An instance slot
keeps its uuid for life; every process started in that slot gets a larger *incarnation*, so that a fresh, empty process
behind an old address is never mistaken for its predecessor.
"""

from __future__ import annotations

import msgspec


class InstanceRef(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One incarnation of one instance slot. `incarnation` is the start time in microseconds."""

    uuid: str
    incarnation: int


def absence(wanted: InstanceRef, here: InstanceRef) -> str:
    """What an instance says to who meant another one at its address."""
    return f"{wanted.uuid}/{wanted.incarnation} is not here, this is {here.uuid}/{here.incarnation}"


class AttemptRef(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One planning of one request."""

    request_id: str
    attempt: int
