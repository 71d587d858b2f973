"""Memory below the GPU of one instance: blocks that its page pool evicts go down tier by tier, and come up when a
prompt that begins with them arrives.

A tier keeps the blocks used last; the oldest of one goes to the next, of the last away. Blocks stay where they were
when they are copied up. A tier reads for one request after the other, at its bandwidth; writes are taken to be free,
as they run beside the reads in the other direction. A Conductor is not told what lies here: a tier helps where routing
brings the request by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

TIERS = ("peer", "dram", "ssd")
"""Where tokens may be brought from to a GPU; `peer`: the GPU of another instance."""


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one instance."""

    name: str
    tokens: int
    bytes_per_us: float
    latency_us: float = 100.0
    """Of one read, however long: one for each request."""


def check_tier(spec: TierSpec, block_size: int) -> None:
    """Raises ValueError for a tier that could hold no block, or never read one."""
    if spec.tokens < block_size:
        raise ValueError(f"tier {spec.name}: {spec.tokens} tokens are not one block of {block_size}")
    if not spec.bytes_per_us > 0:
        raise ValueError(f"tier {spec.name}: nothing is read at {spec.bytes_per_us:g} bytes per microsecond")


class LowerTiers:
    """`specs` from the fastest on."""

    def __init__(self, specs: Sequence[TierSpec], block_size: int, block_bytes: int) -> None:
        self._specs = specs
        self._block_bytes = block_bytes
        self._capacity = [spec.tokens // block_size for spec in specs]
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in specs]
        self._free_us = [0.0] * len(specs)

    def put(self, hashes: Iterable[bytes]) -> None:
        """Blocks that the GPU does not have any more."""
        for block in hashes:
            self._put(0, block)

    def _put(self, level: int, block: bytes) -> None:
        if level == len(self._held):
            return
        held = self._held[level]
        held[block] = None
        held.move_to_end(block)
        if len(held) > self._capacity[level]:
            self._put(level + 1, held.popitem(last=False)[0])

    def locate(self, hashes: Sequence[bytes]) -> list[int]:
        """The tier of each block of the longest prefix of `hashes` that is here, as an index of `specs`."""
        levels = []
        for block in hashes:
            level = next((number for number, held in enumerate(self._held) if block in held), None)
            if level is None:
                break
            self._held[level].move_to_end(block)
            levels.append(level)
        return levels

    def read(self, levels: Sequence[int], now_us: int) -> int:
        """Begin to read so many blocks of each tier; when the last of them is there. Tiers read side by side."""
        ends_us = [float(now_us)]
        for level, run in groupby(sorted(levels)):
            spec = self._specs[level]
            size_bytes = len(list(run)) * self._block_bytes
            begin_us = max(self._free_us[level], now_us)
            self._free_us[level] = begin_us + spec.latency_us + size_bytes / spec.bytes_per_us
            ends_us.append(self._free_us[level])
        return round(max(ends_us))

    def names(self, levels: Iterable[int]) -> Counter[str]:
        """How many of the blocks lie in each tier."""
        return Counter(self._specs[level].name for level in levels)
