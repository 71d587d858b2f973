"""Eviction policies of one pool, and the published hit rates (claim C1) where the trace lies beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.block_cache import BlockCache, hit_rate
from simulator.traces import read_trace

STAND_IN = Path(__file__).parents[3] / "shared" / "data" / "traces" / "toolagent_like_seed1.jsonl"

PUBLISHED = {
    "lru": (0.03, {None: 0.51, 100_000: 0.51, 50_000: 0.50, 30_000: 0.48, 10_000: 0.40, 1_000: 0.30}),
    "lfu": (0.05, {None: 0.51, 100_000: 0.51, 50_000: 0.49, 30_000: 0.43, 10_000: 0.35, 1_000: 0.30}),
    "length-aware": (0.05, {None: 0.51, 100_000: 0.50, 50_000: 0.48, 30_000: 0.42, 10_000: 0.35, 1_000: 0.30}),
}


def test_only_a_prefix_without_a_hole_is_a_hit() -> None:
    cache = BlockCache("lru", None)
    assert cache.use([1, 2, 3]) == 0
    assert cache.use([1, 9, 3]) == 1
    assert cache.use([1, 2, 3]) == 3


def test_lru_drops_what_was_used_longest_ago() -> None:
    cache = BlockCache("lru", 2)
    for block in (1, 2, 1, 3):
        cache.use([block])
    assert [cache.use([block]) for block in (1, 3)] == [1, 1]


def test_lru_drops_the_end_of_a_prompt_before_its_beginning() -> None:
    cache = BlockCache("lru", 3)
    cache.use([1, 2, 3])
    cache.use([9])
    assert cache.use([1, 2]) == 2


def test_lfu_keeps_what_is_used_often_though_long_ago() -> None:
    cache = BlockCache("lfu", 2)
    for block in (1, 1, 2, 3):
        cache.use([block])
    assert [cache.use([block]) for block in (1, 2)] == [1, 0]


def test_length_aware_drops_the_block_furthest_back_among_equals() -> None:
    cache = BlockCache("length-aware", 4)
    cache.use([1, 2, 3])
    cache.use([7])
    cache.use([8])
    assert cache.use([1, 2, 3]) == 2


def test_unknown_policies_and_impossible_capacities_are_refused() -> None:
    with pytest.raises(ValueError, match="known: length-aware, lfu, lru"):
        BlockCache("fifo", 1)
    with pytest.raises(ValueError, match="capacity 0"):
        BlockCache("lru", 0)


@pytest.mark.slow
@pytest.mark.skipif(not STAND_IN.exists(), reason="the stand-in trace is not beside the checkout")
@pytest.mark.parametrize("policy", PUBLISHED)
def test_hit_rates_come_close_to_the_published_ones(policy: str) -> None:
    prompts = [request.prefix_ids for request in read_trace(STAND_IN).requests]
    tolerance, published = PUBLISHED[policy]
    for capacity, rate in published.items():
        assert hit_rate(prompts, policy, capacity).rate == pytest.approx(rate, abs=tolerance), capacity
