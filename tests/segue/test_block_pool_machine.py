"""The pool against a model that keeps, for every page, who refers to it and which block it names."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from segue.block_hash import block_hashes, token_bytes
from segue.block_pool import BlockPool
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored

PAGES, SIZE = 7, 2
TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)


class PoolMachine(RuleBasedStateMachine):
    """Tables are what sequences would own; `lru` is the model of the cache, oldest first; `index` of what is found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES, SIZE)
        self.tables: list[list[int]] = []
        self.held: list[list[int]] = []
        self.quarantined: list[int] = []
        self.lru: list[int] = []
        self.index: dict[bytes, int] = {}
        self.heard: set[bytes] = set()

    def allocate(self, count: int) -> list[int]:
        evictions = max(0, count - self.pool.counts().free)
        evicted, self.lru = self.lru[:evictions], self.lru[evictions:]
        self.index = {name: page for name, page in self.index.items() if page not in evicted}
        pages = self.pool.allocate(count)
        assert set(evicted) <= set(pages)
        return pages

    def matched(self, hashes: list[bytes]) -> list[int]:
        pages = []
        for name in hashes:
            if name not in self.index:
                break
            pages.append(self.index[name])
        return pages

    @rule(tokens=TOKENS, twin=st.booleans())
    def run_sequence(self, tokens: list[int], twin: bool) -> None:
        """A `twin` computes what is cached once more, as if another sequence had published it a moment ago."""
        hashes = block_hashes(b"root", token_bytes(tokens), SIZE)
        cached = self.pool.match(hashes)
        assert cached == self.matched(hashes)
        cached = [] if twin else cached
        missing = len(hashes) - len(cached)
        fits = missing <= self.pool.counts().free + len([page for page in self.lru if page not in cached])
        assert self.pool.can_allocate(missing, cached) == fits
        if not fits:
            return
        self.pool.acquire(cached)
        self.lru = [page for page in self.lru if page not in cached]
        table = cached + self.allocate(missing)
        for block in range(len(cached), len(hashes)):
            canonical = self.pool.publish(table[block], hashes[block], hashes[block - 1] if block else b"")
            assert canonical == self.index.setdefault(hashes[block], table[block])
        self.tables.append(table)

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        if self.pool.can_allocate(count):
            pages = self.allocate(count)
            self.pool.hold(pages)
            self.held.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish_sequence(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        used = Counter(page for other in self.tables for page in other)
        self.lru += [page for page in reversed(table) if page in self.index.values() and not used[page]]

    @precondition(lambda self: self.held)
    @rule(outcome=st.sampled_from(["land", "free", "quarantine"]))
    def end_reservation(self, outcome: str) -> None:
        pages = self.held.pop(0)
        if outcome == "quarantine":
            self.pool.quarantine(pages)
            self.quarantined += pages
            return
        self.pool.unhold(pages)
        if outcome == "land":
            self.tables.append(pages)
        else:
            self.pool.release(pages)

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self) -> None:
        self.pool.unquarantine(self.quarantined)
        self.quarantined = []

    @rule()
    def listen(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, BlocksStored):
                assert not self.heard & set(event.hashes)
                self.heard |= set(event.hashes)
            elif isinstance(event, BlocksRemoved):
                assert set(event.hashes) <= self.heard
                self.heard -= set(event.hashes)
        assert self.heard == set(self.index)
        told = [
            name for event in self.pool.snapshot_events() if isinstance(event, BlocksStored) for name in event.hashes
        ]
        assert sorted(told) == sorted(self.index)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.index, self.lru, self.heard = {}, [], set()
        assert self.pool.drain_events() == [BlocksCleared()]

    @invariant()
    def every_page_is_where_the_model_has_it(self) -> None:
        self.pool.check(self.tables)
        counts = self.pool.counts()
        assert counts.active == len({page for table in self.tables for page in table})
        assert counts.held == sum(map(len, self.held))
        assert counts.quarantined == len(self.quarantined)
        assert counts.cached == len(self.lru)
        assert counts.free + counts.active + counts.cached + counts.held + counts.quarantined == counts.total


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
