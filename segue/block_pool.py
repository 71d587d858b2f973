"""Who owns which KV page of one pool. Pure bookkeeping: page ids only, the memory itself is elsewhere.

A page is in exactly one state:

    free         no reference, content worthless
    active       referenced by at least one block table
    cached       no reference, but its block is published: readable by the next sequence that matches, evictable
    held         referenced by holds alone: reserved for a remote write, or named by a plan still in flight
    quarantined  a remote write may still land: nobody's, until its mover has fenced the peer off

A reference belongs to a block table, or is a *hold*. `allocate` and `acquire` give references for tables; `hold` turns
one into a hold and `unhold` turns it back, so that at any time

    free + active + cached + held + quarantined == total        and        references == table entries + holds.

Only a *published* page can be found by `match`. A page is published once its block is full and its K/V final; from then
on it is read-only: `is_shared` says that a writer needs its own copy. A hash names one page: when a block is published
that another page has already, the newcomer stays private to its sequence and is freed, not cached, in the end.

Cached pages leave in least-recently-released order. `release` takes a table front to back and queues it back to front,
so that a suffix goes before the prefix it hangs on. A child can outlive its parent only where its sequence read a
private twin of the parent; such an orphan is not matched until the parent's block comes back, and ages out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

import msgspec

from segue.errors import InternalError
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class PoolCounts(msgspec.Struct, frozen=True):
    """Pages by state."""

    free: int
    active: int
    cached: int
    held: int
    quarantined: int
    total: int


class BlockPool:
    """Allocator and prefix cache of `pages_total` pages of `block_size` tokens. All operations are O(pages named)."""

    def __init__(self, pages_total: int, block_size: int, caching: bool = True) -> None:
        if pages_total < 1 or block_size < 1:
            raise ValueError(f"a pool needs pages and a block size, got {pages_total} and {block_size}")
        self.pages_total = pages_total
        self.block_size = block_size
        self.caching = caching
        self._free = list(range(pages_total - 1, -1, -1))
        self._refs = [0] * pages_total
        self._holds: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: list[bytes | None] = [None] * pages_total
        self._parent_of: dict[bytes, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._events: list[KvEvent] = []

    # -- looking up and taking pages

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest published prefix of a hash chain. Takes no reference: `acquire` before anything else."""
        pages = []
        page_of = self._page_of
        for block_hash in hashes:
            page = page_of.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """One more reference to each of these published or referenced pages."""
        for page in pages:
            if self._refs[page] == 0:
                if page not in self._cached:
                    raise InternalError(f"page {page} acquired, but it is neither cached nor referenced")
                del self._cached[page]
            self._refs[page] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` private pages with one reference each: free ones first, then the oldest of the cache."""
        if not self.can_allocate(count):
            raise InternalError(f"{count} pages allocated where only {self.pages_allocatable} are left")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict_oldest()
            self._refs[page] = 1
            pages.append(page)
        return pages

    def can_allocate(self, count: int, reuse: Collection[int] = ()) -> bool:
        """Whether `count` pages can be allocated after `reuse` has been acquired."""
        if count > self.pages_allocatable:
            return False
        return count <= self.pages_allocatable - sum(1 for page in reuse if page in self._cached)

    @property
    def pages_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def release(self, pages: Sequence[int]) -> None:
        """Give back one table reference to each page, named front to back. Published pages stay as cache."""
        for page in reversed(pages):
            refs = self._refs[page] - 1
            if refs < self._holds.get(page, 0):
                raise InternalError(f"page {page} released more often than it was taken")
            self._refs[page] = refs
            if refs == 0:
                if self._hash_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def _evict_oldest(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.unpublish(page)
        return page

    # -- sharing

    def publish(self, page: int, block_hash: bytes, parent: bytes) -> int:
        """Make a full, final block findable; `parent` is b"" for the first block of a chain.

        Returns the canonical page of the hash: `page`, or another one that was there first (then `page` stays private).
        Without caching nothing is published and `page` is returned.
        """
        if not self.caching:
            return page
        if self._refs[page] <= self._holds.get(page, 0):
            raise InternalError(f"page {page} published, but no block table has it")
        canonical = self._page_of.setdefault(block_hash, page)
        if canonical != page or self._hash_of[page] == block_hash:
            return canonical
        if self._hash_of[page] is not None:
            raise InternalError(f"page {page} published under a second hash")
        self._hash_of[page] = block_hash
        self._parent_of[block_hash] = parent
        self._note_stored(block_hash, parent)
        return page

    def unpublish(self, page: int) -> None:
        """Forget the block of a page, so that no other sequence finds it any more. Private pages are left alone."""
        block_hash = self._hash_of[page]
        if block_hash is None:
            return
        self._hash_of[page] = None
        del self._page_of[block_hash]
        del self._parent_of[block_hash]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)
        self._note_removed(block_hash)

    def is_shared(self, page: int) -> bool:
        """Whether someone else reads the page, or may start to: it must not be written in place."""
        return self._refs[page] > 1 or self._hash_of[page] is not None

    def references(self, page: int) -> int:
        return self._refs[page]

    def is_closed(self, page: int) -> bool:
        """Whether no batch uses the page: held by holds alone, or quarantined. A peer may write only such pages."""
        return page in self._quarantined or 0 < self._refs[page] == self._holds.get(page, 0)

    def clear_cache(self) -> None:
        """Unpublish everything; cached pages become free, active ones stay with their sequences."""
        self._free.extend(self._cached)
        self._cached.clear()
        for page in self._page_of.values():
            self._hash_of[page] = None
        self._page_of.clear()
        self._parent_of.clear()
        self._events = [BlocksCleared()]

    # -- pages that no batch may touch

    def hold(self, pages: Iterable[int]) -> None:
        """Turn one table reference of each page into a hold."""
        for page in pages:
            holds = self._holds.get(page, 0) + 1
            if holds > self._refs[page]:
                raise InternalError(f"page {page} held without a reference")
            self._holds[page] = holds

    def unhold(self, pages: Iterable[int]) -> None:
        """Turn one hold of each page back into a table reference."""
        for page in pages:
            holds = self._holds.get(page, 0)
            if holds == 0:
                raise InternalError(f"page {page} is not held")
            if holds == 1:
                del self._holds[page]
            else:
                self._holds[page] = holds - 1

    def quarantine(self, pages: Iterable[int]) -> None:
        """Take held pages away from everybody: a remote write may still land in them."""
        for page in pages:
            if self._holds.get(page) != 1 or self._refs[page] != 1:
                raise InternalError(f"page {page} quarantined, but not held exactly once and by nobody else")
            self.unpublish(page)
            del self._holds[page]
            self._refs[page] = 0
            self._quarantined.add(page)

    def unquarantine(self, pages: Iterable[int]) -> None:
        """The peer is fenced off: the pages are free again."""
        for page in pages:
            if page not in self._quarantined:
                raise InternalError(f"page {page} is not quarantined")
            self._quarantined.remove(page)
            self._free.append(page)

    # -- what others are told

    def counts(self) -> PoolCounts:
        held = sum(1 for page, holds in self._holds.items() if self._refs[page] == holds)
        free, cached, quarantined = len(self._free), len(self._cached), len(self._quarantined)
        active = self.pages_total - free - cached - held - quarantined
        return PoolCounts(free, active, cached, held, quarantined, self.pages_total)

    def drain_events(self) -> list[KvEvent]:
        """What was published and removed since the last call, in order, runs of one chain in one event."""
        events, self._events = self._events, []
        return events

    def snapshot_events(self) -> list[KvEvent]:
        """BlocksCleared, then everything published, parents before children: also what `drain_events` has still to tell
        (told again afterwards, it changes nothing)."""
        children: dict[bytes, list[bytes]] = {}
        roots = []
        for block_hash, parent in self._parent_of.items():
            if parent in self._page_of:
                children.setdefault(parent, []).append(block_hash)
            else:
                roots.append(block_hash)
        events: list[KvEvent] = [BlocksCleared()]
        while roots:
            chain = [roots.pop()]
            while heirs := children.get(chain[-1]):
                chain.append(heirs[0])
                roots.extend(heirs[1:])
            events.append(BlocksStored(self._parent_of[chain[0]], chain))
        return events

    def _note_stored(self, block_hash: bytes, parent: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.hashes[-1] == parent:
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksStored(parent, [block_hash]))

    def _note_removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved([block_hash]))

    # -- invariants

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise InternalError where an invariant is broken; with all block `tables`, count the references too."""
        states = Counter(self._free)
        states.update(self._cached.keys())
        states.update(self._quarantined)
        states.update(page for page, refs in enumerate(self._refs) if refs > 0)
        if len(states) != self.pages_total or any(times != 1 for times in states.values()):
            raise InternalError(f"pages lost or in two states: {[p for p, times in states.items() if times != 1]}")
        if any(holds > self._refs[page] or holds < 1 for page, holds in self._holds.items()):
            raise InternalError("more holds than references")
        if {block_hash: page for page, block_hash in enumerate(self._hash_of) if block_hash} != self._page_of:
            raise InternalError("published pages and the hash index differ")
        if any(self._hash_of[page] is None for page in self._cached) or any(self._hash_of[p] for p in self._free):
            raise InternalError("a page is cached without a block, or free with one")
        if tables is not None:
            entries = Counter(page for table in tables for page in table)
            entries.update(self._holds)
            wrong = [page for page, refs in enumerate(self._refs) if refs != entries[page]]
            if wrong:
                raise InternalError(f"references differ from table entries + holds on pages {wrong}")
