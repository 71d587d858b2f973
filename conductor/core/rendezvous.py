"""Stable choice among equals (highest random weight hashing): the same key prefers the same instance on every
Conductor, and an instance that leaves moves only its own keys."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

_MASK = (1 << 64) - 1
_ODD = 0xBF58476D1CE4E5B9


def stable_hash(data: bytes) -> int:
    """64 bits, the same in every process (unlike `hash`)."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def weight(key_hash: int, instance_hash: int) -> int:
    """Random but fixed weight of an instance for a key. Both are hashes already: one odd multiplier (splitmix64's)
    spreads their difference over the high bits."""
    return (key_hash ^ instance_hash) * _ODD & _MASK


def weights(key_hash: int, instance_hashes: Iterable[int]) -> list[int]:
    """`weight` of many, in a third of the time."""
    return [(key_hash ^ instance_hash) * _ODD & _MASK for instance_hash in instance_hashes]
