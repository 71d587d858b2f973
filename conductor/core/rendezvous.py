"""Stable choice among equals (highest random weight hashing): the same key prefers the same instance on every
Conductor, and an instance that leaves moves only its own keys."""

from __future__ import annotations

from hashlib import blake2b

_MASK = (1 << 64) - 1


def stable_hash(data: bytes) -> int:
    """64 bits, the same in every process (unlike `hash`)."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def weight(key_hash: int, instance_hash: int) -> int:
    """Random but fixed weight of an instance for a key: the finaliser of splitmix64 over both."""
    mixed = key_hash ^ instance_hash
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)
