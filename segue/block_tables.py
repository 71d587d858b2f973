"""Every change of one sequence's block table: admission onto a cached prefix, growth, copy-on-write, publishing.

Only blocks of final tokens whose K/V has been computed by a result that landed are hashed and published; the chain of
hashes is extended block by block and kept with the sequence, so that no step hashes a token twice.
"""

from __future__ import annotations

from segue.block_hash import block_hashes, token_bytes
from segue.block_pool import BlockPool
from segue.sequence import Sequence


class BlockTables:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.block_size

    def blocks(self, positions: int) -> int:
        """Pages that so many positions need."""
        return -(-positions // self._size)

    # -- admission

    def match(self, seq: Sequence) -> list[int]:
        """Pages of the longest published prefix of the known tokens; no reference is taken. None of them for a sequence
        whose prompt has to be scored: it computes every position itself."""
        if seq.wants_scores:
            return []
        return self._pool.match(self.hash_blocks(seq, len(seq.tokens) // self._size))

    def place(self, seq: Sequence, cached: list[int], spare: int) -> int:
        """Fill the empty table with `cached` and fresh pages for all known tokens, if `spare` pages are left then.

        At least the last token is recomputed. If the hit is complete, that needs one more page for a copy; without one,
        the last block is given up. Returns 0, or how many pages are needed at least.
        """
        known = len(seq.tokens)
        count = self.blocks(known) - len(cached)
        copies = int(len(cached) * self._size == known)
        if copies and not self._pool.can_allocate(count + copies + spare, cached):
            cached, count, copies = cached[:-1], count + 1, 0
        wanted = count + copies + spare
        if not self._pool.can_allocate(wanted, cached):
            return wanted
        self._pool.acquire(cached)
        seq.pages = cached + self._pool.allocate(count)
        self._start_at(seq, len(cached) * self._size, len(cached))
        return 0

    def land(self, seq: Sequence, cached: list[int], new: list[int], tokens_ready: int) -> None:
        """Take over pages that were written from outside, and publish what is full."""
        seq.pages = cached + new
        ready = min(tokens_ready, len(seq.tokens), len(seq.pages) * self._size)
        self._start_at(seq, ready, len(cached))
        self.publish(seq, ready)

    def _start_at(self, seq: Sequence, ready: int, blocks_cached: int) -> None:
        seq.scheduled = seq.computed = min(ready, len(seq.tokens) - 1)
        seq.blocks_published = blocks_cached
        if seq.tokens_cached is None:
            seq.tokens_cached = min(blocks_cached * self._size, seq.tokens_prompt, len(seq.tokens) - 1)

    # -- growth

    def missing(self, seq: Sequence, positions: int) -> int:
        """Pages to be added before `positions` fit."""
        return max(0, self.blocks(positions) - len(seq.pages))

    def grow(self, seq: Sequence, count: int) -> list[int]:
        pages = self._pool.allocate(count)
        seq.pages.extend(pages)
        return pages

    # -- the first block written to

    def must_copy(self, seq: Sequence, missing: int) -> bool:
        """Whether the first position to be written lies in a shared page, which has to be copied before.

        If there is no room for a copy beside `missing` pages, and nobody else reads the page, it leaves the cache and
        is written in place: a sequence alone in the pool can always go on.
        """
        block = seq.scheduled // self._size
        if block >= len(seq.pages) or not self._pool.is_shared(seq.pages[block]):
            return False
        if self._pool.can_allocate(missing + 1) or self._pool.references(seq.pages[block]) > 1:
            return True
        self._pool.unpublish(seq.pages[block])
        seq.blocks_published = block
        return False

    def copy_on_write(self, seq: Sequence) -> tuple[int, int]:
        """Put a fresh page in the place of the first one to be written to. Returns (source, target); the source stays
        held until the plan that copies it has landed."""
        block = seq.scheduled // self._size
        source = seq.pages[block]
        (target,) = self._pool.allocate(1)
        seq.pages[block] = target
        self._pool.hold([source])
        return source, target

    # -- hashes

    def hash_blocks(self, seq: Sequence, count: int) -> list[bytes]:
        """Hashes of at least the first `count` blocks, which must be full and final; none without caching."""
        if not self._pool.caching:
            return []
        size, hashes = self._size, seq.hashes
        if len(hashes) < count:
            parent = hashes[-1] if hashes else seq.hash_root
            missing = token_bytes(seq.tokens[len(hashes) * size : count * size])
            hashes += block_hashes(parent, missing, size)
        return hashes

    def publish(self, seq: Sequence, positions: int) -> None:
        """Publish the blocks that lie wholly in the first `positions`, whose K/V is final."""
        count = positions // self._size
        if count <= seq.blocks_published:
            return
        hashes = self.hash_blocks(seq, count)
        for block in range(seq.blocks_published, count if hashes else 0):
            self._pool.publish(seq.pages[block], hashes[block], hashes[block - 1] if block else b"")
        seq.blocks_published = count

    def forget(self, seq: Sequence) -> None:
        """Take all that a sequence read or wrote out of the cache: one of its results was bad."""
        for page in seq.pages:
            self._pool.unpublish(page)


def shared_blocks(left: list[bytes], right: list[bytes]) -> int:
    """Length of the common prefix of two hash chains, in O(log): equal hashes mean equal prefixes."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
