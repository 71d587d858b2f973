"""Stable choice among equals (highest random weight hashing): the same key prefers the same instance on every
Conductor, and an instance that leaves moves only its own keys."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def weight(key: bytes, uuid: str) -> int:
    return int.from_bytes(blake2b(uuid.encode(), key=key[:64], digest_size=8).digest())


def rendezvous(key: bytes, uuids: Iterable[str]) -> str:
    """The preferred one of `uuids` (not empty)."""
    return max(uuids, key=lambda uuid: (weight(key, uuid), uuid))
