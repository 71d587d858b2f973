"""Which instance holds which KV blocks, as told by the instances themselves.

Theory. Each instance (uuid) owns a *slot*: one bit. For each tier a table maps a block hash to the mask of slots that
hold the block, so that a million blocks shared by many instances cost one entry each, and the longest prefix of *all*
instances falls out of one walk over the chain (AND the masks until nothing is left).

An instance's blocks are *believed* while every message it published has been applied: a sequence gap ends the belief
until the missing messages are replayed or a snapshot replaces them. Voiding an instance (clear, snapshot, restart,
leave) only takes its slot out of the live mask and gives it a fresh one: O(1). The old bits are swept out later, a few
entries at a time, and only then is the slot used again; a bit of a retired slot is never matched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import groupby

from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch

MASKS_INTERNED_MAX = 1 << 16
"""Distinct holder masks that are shared between table entries; past it the cache starts over (memory only)."""


class Applied(Enum):
    """What became of a published message."""

    APPLIED = "applied"
    GAP = "gap"
    """Messages before this one are missing: it was not applied, ask for a resync."""
    STALE = "stale"
    """A duplicate, or of an incarnation that is gone."""
    UNKNOWN = "unknown"
    """The instance is not a member."""


class _Holder:
    """What is known of one instance."""

    __slots__ = ("incarnation", "sequence_applied", "sequence_seen", "slot")

    def __init__(self, incarnation: int, slot: int) -> None:
        self.incarnation = incarnation
        self.slot = slot
        self.sequence_applied = 0
        self.sequence_seen = 0

    @property
    def believed(self) -> bool:
        return 0 < self.sequence_seen == self.sequence_applied


class _Table:
    """Holder masks of one tier. While a sweep runs, entries move from `unswept` to `entries`; a hash is in one only."""

    __slots__ = ("entries", "unswept")

    def __init__(self) -> None:
        self.entries: dict[bytes, int] = {}
        self.unswept: dict[bytes, int] = {}

    def holders(self, block: bytes) -> int:
        return self.entries.get(block) or self.unswept.get(block, 0)

    def lookup(self) -> Callable[[bytes], int | None]:
        """The holders of a block, None or 0 for nobody; valid until the next change."""
        return self.holders if self.unswept else self.entries.get

    def replace(self, block: bytes, mask: int) -> None:
        self.unswept.pop(block, None)
        if mask:
            self.entries[block] = mask
        else:
            self.entries.pop(block, None)


class PrefixIndex:
    """Longest usable prefix per instance. Hashes are 16-byte chain hashes (`segue.block_hash`)."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._tables: dict[str, _Table] = {}
        self._owner_by_slot: dict[int, str] = {}
        self._blocks_by_slot: dict[int, int] = {}
        """(block, tier) pairs with this slot's bit, live and retired slots alike."""
        self._slots_free: list[int] = []
        self._slots_made = 0
        self._retired_mask = 0
        self._sweeping_mask = 0
        self._live: int | None = None
        """Mask of the believed instances; None: to be computed."""
        self._masks: dict[int, int] = {}

    def join(self, ref: InstanceRef) -> None:
        """Make `ref` a member that holds nothing; it is believed from its message 1 or its first snapshot on. No change
        when this incarnation is a member already."""
        holder = self._holders.get(ref.uuid)
        if holder is not None and holder.incarnation == ref.incarnation:
            return
        self.leave(ref.uuid)
        self._holders[ref.uuid] = _Holder(ref.incarnation, self._take_slot(ref.uuid))

    def leave(self, uuid: str) -> None:
        """Forget the instance and its blocks. Unknown ones are ignored."""
        holder = self._holders.pop(uuid, None)
        if holder is not None:
            self._live = None
            self._retire(holder.slot)

    def apply(self, batch: KvEventBatch) -> Applied:
        """Take in one message; see `Applied`. A snapshot is applied whatever was missed before it."""
        outcome = self._admit(batch.ref, batch.sequence, snapshot=batch.snapshot)
        if outcome is Applied.APPLIED:
            holder = self._holders[batch.ref.uuid]
            if batch.snapshot:
                self._void(batch.ref.uuid, holder)
            for event in batch.events:
                self._apply_event(batch.ref.uuid, holder, event)
        return outcome

    def advance(self, ref: InstanceRef, sequence: int) -> Applied:
        """Count a message that carries no KV event (a load report): a gap before it shows just the same."""
        return self._admit(ref, sequence, snapshot=False)

    def is_believed(self, uuid: str) -> bool:
        holder = self._holders.get(uuid)
        return holder is not None and holder.believed

    def sequence_applied(self, uuid: str) -> int:
        """Where a replay has to go on; 0 asks for a snapshot."""
        return self._holders[uuid].sequence_applied

    def match(self, hashes: Sequence[bytes], tiers: Sequence[str] | None = None) -> dict[str, int]:
        """Blocks of `hashes`, counted from the first, that each believed instance holds without a hole (in any of
        `tiers`, all by default). Instances with none are left out."""
        matched: dict[str, int] = {}
        held, depth = self._live_mask(), 0
        # Masks are interned, so that along a chain most entries have the very same one: runs of it cost no bytecode.
        for mask, run in groupby(map(self._lookup(tiers), hashes)):
            still = held & (mask or 0)
            if still != held:
                self._note(matched, held ^ still, depth)
                held = still
            if not held:
                return matched
            depth += len(list(run))
        self._note(matched, held, depth)
        return matched

    def is_held(self, block: bytes) -> bool:
        """Whether any member, believed or not, says that it holds the block in some tier."""
        return any(table.holders(block) & ~self._gone_mask() for table in self._tables.values())

    def blocks(self, uuid: str) -> int:
        """(block, tier) pairs that the instance said it holds."""
        return self._blocks_by_slot[self._holders[uuid].slot]

    def entries(self) -> int:
        return sum(len(table.entries) + len(table.unswept) for table in self._tables.values())

    def sweep(self, entries_max: int) -> None:
        """Clear the bits of retired slots out of at most `entries_max` entries."""
        if not self._sweeping_mask:
            self._begin_sweep()
        for table in self._tables.values():
            while table.unswept and entries_max > 0:
                block, mask = table.unswept.popitem()
                kept = mask & ~self._sweeping_mask
                if kept:
                    table.entries[block] = self._intern(kept)
                entries_max -= 1
        if self._sweeping_mask and not any(table.unswept for table in self._tables.values()):
            self._end_sweep()

    def check(self) -> None:
        """Raise AssertionError when a count and the tables disagree."""
        found = dict.fromkeys(self._blocks_by_slot, 0)
        for table in self._tables.values():
            assert not table.entries.keys() & table.unswept.keys(), "a block is in both halves of a table"
            for mask in (*table.entries.values(), *table.unswept.values()):
                assert mask, "an entry without holders"
                for slot in _slots(mask):
                    found[slot] += 1
        for holder in self._holders.values():
            assert found[holder.slot] == self._blocks_by_slot[holder.slot], "block count of a live slot"
        assert len(self._owner_by_slot) == len(self._holders), "a slot without a member"
        assert not self._retired_mask & _mask(self._owner_by_slot), "a live slot is retired"

    # -- messages

    def _admit(self, ref: InstanceRef, sequence: int, *, snapshot: bool) -> Applied:
        holder = self._holders.get(ref.uuid)
        if holder is None:
            return Applied.UNKNOWN
        if ref.incarnation < holder.incarnation:
            return Applied.STALE
        if ref.incarnation > holder.incarnation:
            self.join(ref)
            holder = self._holders[ref.uuid]
        self._live = None
        holder.sequence_seen = max(holder.sequence_seen, sequence)
        if sequence <= holder.sequence_applied:
            return Applied.STALE
        if sequence > holder.sequence_applied + 1 and not snapshot:
            return Applied.GAP
        holder.sequence_applied = sequence
        return Applied.APPLIED

    def _apply_event(self, uuid: str, holder: _Holder, event: KvEvent) -> None:
        match event:
            case BlocksStored(hashes=hashes, tier=tier):
                self._store(self._tables.setdefault(tier, _Table()), holder.slot, hashes)
            case BlocksRemoved(hashes=hashes, tier=tier):
                self._remove(self._tables.setdefault(tier, _Table()), holder.slot, hashes)
            case BlocksCleared():
                self._void(uuid, holder)

    def _store(self, table: _Table, slot: int, hashes: Sequence[bytes]) -> None:
        bit = 1 << slot
        for block in hashes:
            mask = table.holders(block) & ~self._sweeping_mask
            if not mask & bit:
                table.replace(block, self._intern(mask | bit))
                self._blocks_by_slot[slot] += 1

    def _remove(self, table: _Table, slot: int, hashes: Sequence[bytes]) -> None:
        bit = 1 << slot
        for block in hashes:
            mask = table.holders(block) & ~self._sweeping_mask
            if mask & bit:
                table.replace(block, self._intern(mask ^ bit))
                self._blocks_by_slot[slot] -= 1

    # -- matching

    def _lookup(self, tiers: Sequence[str] | None) -> Callable[[bytes], int | None]:
        names = tuple(self._tables) if tiers is None else tiers
        lookups = [self._tables[name].lookup() for name in names if name in self._tables]
        if len(lookups) == 1:
            return lookups[0]

        def any_tier(block: bytes) -> int:
            mask = 0
            for lookup in lookups:
                mask |= lookup(block) or 0
            return mask

        return any_tier

    def _live_mask(self) -> int:
        if self._live is None:
            self._live = _mask(holder.slot for holder in self._holders.values() if holder.believed)
        return self._live

    def _gone_mask(self) -> int:
        return self._retired_mask | self._sweeping_mask

    def _note(self, matched: dict[str, int], mask: int, depth: int) -> None:
        if depth:
            for slot in _slots(mask):
                matched[self._owner_by_slot[slot]] = depth

    # -- slots

    def _void(self, uuid: str, holder: _Holder) -> None:
        if self._blocks_by_slot[holder.slot]:
            self._retire(holder.slot)
            holder.slot = self._take_slot(uuid)

    def _take_slot(self, uuid: str) -> int:
        if self._slots_free:
            slot = heapq.heappop(self._slots_free)
        else:
            slot = self._slots_made
            self._slots_made += 1
        self._owner_by_slot[slot] = uuid
        self._blocks_by_slot[slot] = 0
        return slot

    def _retire(self, slot: int) -> None:
        del self._owner_by_slot[slot]
        if self._blocks_by_slot[slot]:
            self._retired_mask |= 1 << slot
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        del self._blocks_by_slot[slot]
        heapq.heappush(self._slots_free, slot)

    def _begin_sweep(self) -> None:
        self._sweeping_mask, self._retired_mask = self._retired_mask, 0
        if self._sweeping_mask:
            for table in self._tables.values():
                table.entries, table.unswept = {}, table.entries

    def _end_sweep(self) -> None:
        for slot in _slots(self._sweeping_mask):
            self._free_slot(slot)
        self._sweeping_mask = 0

    def _intern(self, mask: int) -> int:
        if len(self._masks) >= MASKS_INTERNED_MAX:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)


def _mask(slots: Iterator[int] | dict[int, str]) -> int:
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


def _slots(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
