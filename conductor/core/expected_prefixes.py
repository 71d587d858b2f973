"""Prefixes that are being computed right now: what the KV events will say in a moment.

Without this a burst of siblings with one new prefix would spread over all instances, each computing it again. Chain
hashes make it cheap: two chains that share their first block share a prefix, whose length a binary search finds.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.ids import AttemptRef

SIBLINGS_MAX = 64
"""Live attempts with one first block that are compared; the newest are kept."""


class ExpectedPrefixes:
    """Chains of live attempts by the instance that computes them."""

    def __init__(self) -> None:
        self._siblings: dict[bytes, dict[AttemptRef, tuple[str, list[bytes]]]] = {}
        self._first_block: dict[AttemptRef, bytes] = {}

    def add(self, key: AttemptRef, uuid: str, hashes: list[bytes]) -> None:
        if not hashes:
            return
        siblings = self._siblings.setdefault(hashes[0], {})
        if len(siblings) >= SIBLINGS_MAX:
            oldest = next(iter(siblings))
            del siblings[oldest], self._first_block[oldest]
        siblings[key] = (uuid, hashes)
        self._first_block[key] = hashes[0]

    def drop(self, key: AttemptRef) -> None:
        first = self._first_block.pop(key, None)
        if first is not None:
            siblings = self._siblings[first]
            del siblings[key]
            if not siblings:
                del self._siblings[first]

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Blocks of `hashes` that each instance will hold when its live attempts are computed."""
        matched: dict[str, int] = {}
        if hashes:
            for uuid, chain in self._siblings.get(hashes[0], {}).values():
                matched[uuid] = max(matched.get(uuid, 0), common_prefix(hashes, chain))
        return matched

    def __len__(self) -> int:
        return len(self._first_block)


def common_prefix(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Equal leading blocks of two hash chains: equal at i means equal before i."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
