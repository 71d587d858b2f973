import pytest

from segue.block_pool import BlockPool, PoolCounts
from segue.errors import InternalError
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored


def chain(length: int, name: str = "x") -> list[bytes]:
    return [f"{name}{index}".encode().ljust(16) for index in range(length)]


def publish_chain(pool: BlockPool, pages: list[int], hashes: list[bytes]) -> None:
    for index, (page, block_hash) in enumerate(zip(pages, hashes, strict=True)):
        pool.publish(page, block_hash, hashes[index - 1] if index else b"")


def cached_chain(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    pages = pool.allocate(len(hashes))
    publish_chain(pool, pages, hashes)
    pool.release(pages)
    return pages


def test_released_published_pages_are_found_again() -> None:
    pool = BlockPool(4, 16)
    pages = cached_chain(pool, chain(3))
    assert pool.match(chain(3)) == pages
    assert pool.counts() == PoolCounts(free=1, active=0, cached=3, held=0, quarantined=0, total=4)


def test_match_stops_at_the_first_missing_block() -> None:
    pool = BlockPool(4, 16)
    hashes = chain(3)
    pages = cached_chain(pool, hashes)
    assert pool.match([hashes[0], b"?" * 16, hashes[2]]) == pages[:1]


def test_match_takes_no_reference() -> None:
    pool = BlockPool(2, 16)
    pages = cached_chain(pool, chain(2))
    pool.match(chain(2))
    assert [pool.references(page) for page in pages] == [0, 0]


def test_unpublished_pages_are_free_after_release() -> None:
    pool = BlockPool(2, 16)
    pool.release(pool.allocate(2))
    assert pool.counts().free == 2


def test_suffix_is_evicted_before_its_prefix() -> None:
    pool = BlockPool(3, 16)
    hashes = chain(3)
    pages = cached_chain(pool, hashes)
    assert [pool.allocate(1)[0] for _ in range(3)] == [pages[2], pages[1], pages[0]]


def test_least_recently_released_chain_is_evicted_first() -> None:
    pool = BlockPool(4, 16)
    old, new = cached_chain(pool, chain(2, "old")), cached_chain(pool, chain(2, "new"))
    pool.acquire(old)
    pool.release(old)
    assert sorted(pool.allocate(2)) == sorted(new)


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 16)
    cached_chain(pool, chain(2))
    pool.allocate(1)
    assert len(pool.match(chain(2))) == 2


def test_can_allocate_does_not_count_pages_about_to_be_reused() -> None:
    pool = BlockPool(4, 16)
    pages = cached_chain(pool, chain(3))
    assert pool.can_allocate(4)
    assert pool.can_allocate(1, reuse=pages)
    assert not pool.can_allocate(2, reuse=pages)


def test_can_allocate_counts_pages_that_are_active_already() -> None:
    pool = BlockPool(4, 16)
    pages = cached_chain(pool, chain(2))
    pool.acquire(pages)
    assert pool.can_allocate(2, reuse=pages)


def test_allocating_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(InternalError, match="only 2"):
        pool.allocate(3)
    assert pool.counts().free == 2


def test_page_stays_active_until_its_last_reader_lets_go() -> None:
    pool = BlockPool(1, 16)
    pages = cached_chain(pool, chain(1))
    pool.acquire(pages)
    pool.acquire(pages)
    pool.release(pages)
    assert pool.counts().active == 1
    pool.release(pages)
    assert pool.counts().cached == 1


def test_second_page_of_a_published_hash_stays_private() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2)
    (block_hash,) = chain(1)
    assert pool.publish(first, block_hash, b"") == first
    assert pool.publish(second, block_hash, b"") == first
    assert not pool.is_shared(second)
    pool.release([second])
    assert pool.counts().free == 1
    assert pool.match([block_hash]) == [first]


def test_published_page_is_shared_even_with_one_reference() -> None:
    pool = BlockPool(1, 16)
    (page,) = pool.allocate(1)
    assert not pool.is_shared(page)
    pool.publish(page, chain(1)[0], b"")
    assert pool.is_shared(page)


def test_unpublished_page_is_writable_again() -> None:
    pool = BlockPool(1, 16)
    (page,) = pool.allocate(1)
    pool.publish(page, chain(1)[0], b"")
    pool.unpublish(page)
    assert not pool.is_shared(page)
    assert pool.match(chain(1)) == []


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(2, 16, caching=False)
    cached_chain(pool, chain(2))
    assert pool.match(chain(2)) == []
    assert pool.counts().free == 2
    assert pool.drain_events() == []


def test_held_pages_are_not_allocatable() -> None:
    pool = BlockPool(3, 16)
    held = pool.allocate(2)
    pool.hold(held)
    assert pool.counts() == PoolCounts(free=1, active=0, cached=0, held=2, quarantined=0, total=3)
    assert not pool.can_allocate(2)


def test_held_page_cannot_be_released() -> None:
    pool = BlockPool(1, 16)
    pages = pool.allocate(1)
    pool.hold(pages)
    with pytest.raises(InternalError, match="released more often"):
        pool.release(pages)


def test_held_page_cannot_be_published() -> None:
    pool = BlockPool(1, 16)
    (page,) = pool.allocate(1)
    pool.hold([page])
    with pytest.raises(InternalError, match="no block table"):
        pool.publish(page, chain(1)[0], b"")


def test_hold_beside_a_reader_keeps_the_page_active() -> None:
    pool = BlockPool(1, 16)
    pages = cached_chain(pool, chain(1))
    pool.acquire(pages)
    pool.acquire(pages)
    pool.hold(pages)
    assert pool.counts().active == 1
    pool.release(pages)
    assert pool.counts().held == 1


def test_quarantined_page_comes_back_only_when_fenced() -> None:
    pool = BlockPool(2, 16)
    pages = pool.allocate(1)
    pool.hold(pages)
    pool.quarantine(pages)
    assert pool.counts() == PoolCounts(free=1, active=0, cached=0, held=0, quarantined=1, total=2)
    pool.unquarantine(pages)
    assert pool.counts().free == 2


def test_page_that_others_read_cannot_be_quarantined() -> None:
    pool = BlockPool(1, 16)
    pages = cached_chain(pool, chain(1))
    pool.acquire(pages)
    pool.acquire(pages)
    pool.hold(pages)
    with pytest.raises(InternalError, match="quarantined"):
        pool.quarantine(pages)


def test_events_tell_chains_and_evictions_in_order() -> None:
    pool = BlockPool(3, 16)
    hashes = chain(3)
    cached_chain(pool, hashes)
    pool.allocate(2)
    assert pool.drain_events() == [BlocksStored(b"", hashes), BlocksRemoved([hashes[2], hashes[1]])]
    assert pool.drain_events() == []


def test_interleaved_chains_are_separate_events() -> None:
    pool = BlockPool(3, 16)
    a, b = chain(2, "a"), chain(1, "b")
    first, second, third = pool.allocate(3)
    pool.publish(first, a[0], b"")
    pool.publish(second, b[0], b"")
    pool.publish(third, a[1], a[0])
    assert pool.drain_events() == [BlocksStored(b"", a[:1]), BlocksStored(b"", b), BlocksStored(a[0], a[1:])]


def test_snapshot_holds_every_published_block_after_its_parent() -> None:
    pool = BlockPool(5, 16)
    trunk, left, right = chain(2, "t"), chain(2, "l"), chain(1, "r")
    pages = pool.allocate(5)
    publish_chain(pool, pages[:2], trunk)
    pool.publish(pages[2], left[0], trunk[1])
    pool.publish(pages[3], left[1], left[0])
    pool.publish(pages[4], right[0], trunk[1])
    clear, *stored = pool.snapshot_events()
    assert clear == BlocksCleared()
    known = {b""}
    for event in stored:
        assert isinstance(event, BlocksStored)
        assert event.parent in known
        known.update(event.hashes)
    assert known == {b"", *trunk, *left, *right}


def test_cleared_cache_is_found_by_nobody_and_says_so() -> None:
    pool = BlockPool(3, 16)
    cached_chain(pool, chain(1, "cached"))
    active = pool.allocate(1)
    publish_chain(pool, active, chain(1, "active"))
    pool.clear_cache()
    assert pool.match(chain(1, "cached")) == pool.match(chain(1, "active")) == []
    assert pool.drain_events() == [BlocksCleared()]
    pool.release(active)
    assert pool.counts().free == 3
    pool.check([])


def test_check_counts_references_against_tables() -> None:
    pool = BlockPool(2, 16)
    pages = pool.allocate(1)
    pool.check([pages])
    with pytest.raises(InternalError, match="references differ"):
        pool.check([])
