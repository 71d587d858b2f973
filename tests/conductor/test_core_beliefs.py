"""Pricing, links, reuse, demand: what policies believe beyond the state of single instances."""

import pytest
from conductor_world import manifest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.demand import MemoryDemand, PrefillDemand
from conductor.core.instance import Instance
from conductor.core.links import LinkBook
from conductor.core.prefill_queue import PrefillQueue
from conductor.core.pricing import Targets, loss, loss_slope
from conductor.core.reuse import ReuseBook
from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from segue.ids import AttemptRef
from segue.manifest import Role

KEY = [AttemptRef(f"r{n}", 1) for n in range(4)]
BLOCKS = [bytes([n]) * 16 for n in range(8)]


# -- pricing


@given(st.floats(0, 20), st.floats(0, 20))
def test_more_latency_never_costs_less_and_each_further_bit_costs_no_less_than_the_last(one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert loss(low) <= loss(high)
    assert loss_slope(low) <= loss_slope(high)


@given(st.floats(0.001, 20))
def test_the_slope_is_the_derivative(share: float) -> None:
    step = 1e-6
    assert (loss(share + step) - loss(share - step)) / (2 * step) == pytest.approx(
        loss_slope(share), rel=1e-3, abs=1e-4
    )


def test_a_long_prompt_may_take_three_times_its_own_prefill() -> None:
    cost = CostModel(
        prefill=PrefillCost(base_us=0, token_us=100, pair_us=0),
        decode=DecodeCost(base_us=1, row_us=1, kv_token_us=1),
        kv_token_bytes=1,
    )
    targets = Targets(ttft_us=2e6, ttft_factor=3.0)
    assert targets.ttft_us_of(cost, 1_000) == 2e6
    assert targets.ttft_us_of(cost, 100_000) == 3e7


# -- links


def test_a_pair_learns_its_own_rate_and_others_learn_from_it_a_little() -> None:
    links = LinkBook(LinkCost(latency_us=0.0, bytes_per_us=1_000.0))
    for _ in range(20):
        links.note("a", "b", 1 << 28, (1 << 28) / 100.0)
    assert links.us("a", "b", 1e6) == pytest.approx(1e4, rel=0.05)
    assert links.us("x", "y", 1e6) == pytest.approx(1e4, rel=0.05), "an unknown pair is like those that are known"


def test_a_short_transfer_cannot_overturn_what_long_ones_taught() -> None:
    links = LinkBook(LinkCost(latency_us=10.0, bytes_per_us=1_000.0))
    links.note("a", "b", 1 << 28, (1 << 28) / 1_000.0)
    links.note("a", "b", 100, 1_000.0)
    links.note("a", "b", 100, 5.0)
    assert links.us("a", "b", 1e6) == pytest.approx(1_010.0, rel=0.05)


# -- reuse


def test_the_share_is_that_of_evicted_blocks_that_were_wanted_again() -> None:
    book = ReuseBook()
    for _ in range(400):
        book.note_evicted(BLOCKS[:4], BLOCKS[:4], 100)
        book.note_wanted(BLOCKS[:3], 0)
    assert book.share(100) == pytest.approx(0.75, rel=0.05)


def test_a_block_that_another_instance_holds_is_not_missed() -> None:
    book = ReuseBook()
    book.note_evicted(BLOCKS[:4], [], 100)
    assert book.note_wanted(BLOCKS[:4], 4) == 0
    assert book.note_wanted(BLOCKS[:4], 0) == 0


def test_only_what_follows_the_cached_prefix_was_missed() -> None:
    book = ReuseBook()
    book.note_evicted(BLOCKS[2:4], BLOCKS[2:4], 100)
    assert book.note_wanted(BLOCKS[:6], 1) == 0, "block 1 was never evicted, so nothing behind it can be of this chain"
    assert book.note_wanted(BLOCKS[:6], 2) == 2
    assert book.note_wanted(BLOCKS[:6], 2) == 0, "missed once"


# -- the queue of an instance


def test_the_head_of_the_queue_is_worked_off_and_the_rest_waits() -> None:
    queue = PrefillQueue()
    queue.add(KEY[0], 100.0, 0)
    queue.add(KEY[1], 50.0, 0)
    assert queue.remaining_us(60) == pytest.approx(90.0)
    queue.done(KEY[0], 100)
    assert queue.remaining_us(100) == pytest.approx(50.0)
    queue.drop(KEY[1])
    assert queue.remaining_us(100) == 0.0


def test_an_instance_that_takes_twice_as_long_is_learned_to_be_slow() -> None:
    queue = PrefillQueue()
    for n in range(30):
        queue.add(KEY[0], 1e6, n * 2_000_000)
        queue.done(KEY[0], (n + 1) * 2_000_000)
    assert queue.slowness == pytest.approx(2.0, rel=0.05)


def test_waiting_for_pages_is_not_slowness() -> None:
    queue = PrefillQueue()
    queue.add(KEY[0], 1e6, 0)
    queue.begin(KEY[0], 50_000_000)
    queue.done(KEY[0], 51_000_000)
    assert queue.slowness == pytest.approx(1.0)


def test_an_instance_that_hangs_does_not_look_idle() -> None:
    queue = PrefillQueue()
    queue.add(KEY[0], 100.0, 0)
    assert queue.remaining_us(10_000_000) >= 1_000_000


# -- demand


def pool(count: int) -> list[Instance]:
    return [Instance(manifest(f"d{n}", Role.DECODE, pages_total=100), 0) for n in range(count)]


def book(memory: MemoryDemand, members: list[Instance], pages: int, interval_us: int) -> None:
    """40 requests, one each `interval_us`, with answers that take a second."""
    for n in range(40):
        members[n % len(members)].pages_taken += pages
        members[n % len(members)].rows_taken += 1
        memory.look(n * interval_us, members, 1e6)


def test_pressure_is_the_rate_of_pages_times_how_long_they_stay() -> None:
    memory, members = MemoryDemand(), pool(2)
    book(memory, members, 10, 100_000)
    assert memory.pressure == pytest.approx(10 * 10 / 200, rel=0.1)


def test_a_page_costs_more_the_more_are_wanted() -> None:
    losses = []
    for pages in (2, 10, 25):
        memory, members = MemoryDemand(), pool(2)
        book(memory, members, pages, 100_000)
        losses.append(memory.loss(5, members[0], 2e6))
    assert losses[0] < losses[1] < losses[2]
    assert losses[0] < 1e-6


def test_a_page_is_worth_something_before_the_pool_is_full_and_no_jump_when_it_is() -> None:
    losses = []
    for interval_us in (75_000, 62_000, 50_500, 50_000, 49_500, 40_000):
        memory, members = MemoryDemand(), pool(2)
        book(memory, members, 10, interval_us)
        losses.append(memory.loss(10, members[0], 1e5))
    assert losses == sorted(losses)
    assert losses[0] > 0.1
    assert losses[4] < 1.2 * losses[2]


def test_shared_pages_stay_whoever_booked_them() -> None:
    memory, members = MemoryDemand(), pool(2)
    members[0].pages_shared = 50
    book(memory, members, 10, 100_000)
    assert memory.pressure == pytest.approx((50 + 10 * 10) / 200, rel=0.1)


def test_the_fuller_of_two_pools_is_the_dearer() -> None:
    memory, members = MemoryDemand(), pool(2)
    members[0].booked_pages = 60
    book(memory, members, 10, 100_000)
    assert memory.loss(10, members[0], 1e5) > 2 * memory.loss(10, members[1], 1e5)


def test_prefill_time_costs_nothing_while_nobody_waits() -> None:
    demand, members = PrefillDemand(), pool(2)
    demand.look(0, members, 0)
    assert demand.loss_per_us(2e6) == 0.0
    demand.look(60_000_000, members, 6)
    assert demand.loss_per_us(2e6) > 0.0
