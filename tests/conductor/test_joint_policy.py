"""The joint choice on clusters whose right answer can be worked out by hand: a token of prefill takes a millisecond."""

import pytest
from conductor_world import BLOCK_SIZE, COST, LAYOUT, World, chain, only

from conductor.core.beliefs import Beliefs
from conductor.core.decisions import Route
from conductor.core.links import LinkBook
from conductor.core.machine import ConductorCore
from segue.cost_model import LinkCost
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

TOKEN_BYTES = LAYOUT.page_bytes // BLOCK_SIZE


def world_with_link(token_us: float) -> World:
    """A fetched token takes `token_us`."""
    links = LinkBook(LinkCost(latency_us=0.0, bytes_per_us=TOKEN_BYTES / token_us))
    return World(ConductorCore(beliefs=Beliefs(cost=COST, links=links)))


def busy_holder(world: World, *, fetches: bool) -> None:
    """p1 holds a prefix and has work for 80 ms; p2 is idle."""
    for name in ("p1", "p2"):
        world.join(name, Role.PREFILL, fetches=fetches, max_num_batched_tokens=512)
    world.join("d1", Role.DECODE, fetches=fetches)
    world.publish("p1", 1, chain("a", 20))
    assert only(Route, world.submit("own", 90, block_hashes=[*chain("a", 2), *chain("own", 20)])).prefill is not None


def test_a_prefix_is_fetched_where_that_is_faster_than_computing_it_or_waiting_for_its_holder() -> None:
    world = world_with_link(token_us=100.0)
    busy_holder(world, fetches=True)
    route = only(Route, world.submit("r", 90, block_hashes=[*chain("a", 20), *chain("b", 2)]))
    assert (route.prefill, route.source, route.tokens_fetched) == (world.refs["p2"], world.refs["p1"], 80)
    assert route.tokens_cached_expected == 80
    assert world.booked()["p2"][0] == 10


def test_nothing_is_fetched_over_a_link_that_is_slower_than_computing() -> None:
    world = world_with_link(token_us=3_000.0)
    for name in ("a1", "a2"):
        world.join(name, Role.AGGREGATED, fetches=True, max_num_batched_tokens=512)
    world.publish("a1", 1, chain("a", 20))
    only(Route, world.submit("own", 100, block_hashes=[*chain("a", 2), *chain("own", 23)]))
    route = only(Route, world.submit("r", 90, block_hashes=[*chain("a", 20), *chain("b", 2)]))
    assert (route.source, route.tokens_fetched) == (None, 0)


def test_instances_that_cannot_fetch_are_offered_no_source() -> None:
    world = world_with_link(token_us=1.0)
    busy_holder(world, fetches=False)
    assert only(Route, world.submit("r", 90, block_hashes=[*chain("a", 20), *chain("b", 2)])).source is None


def test_a_prompt_is_prefilled_at_d_when_every_p_has_a_long_queue() -> None:
    world = World()
    world.join("p1", Role.PREFILL, pages_total=4_096, max_model_len=8_000, max_num_batched_tokens=8_192)
    world.join("d1", Role.DECODE, pages_total=8_192, max_model_len=8_000)
    assert only(Route, world.submit("long", 6_000)).prefill == world.refs["p1"]
    assert only(Route, world.submit("short", 40)).prefill is None


def test_an_idle_p_is_preferred_to_a_prefill_between_decode_steps() -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    assert only(Route, world.submit("r", 40)).prefill == world.refs["p1"]


def test_who_would_have_to_evict_loses_against_free_pages() -> None:
    world = World()
    for name in ("a1", "a2", "a3"):
        world.join(name, Role.AGGREGATED)
    for name in ("a1", "a3"):
        world.report(name, 1, pages_free=0, pages_cached=64)
    world.report("a2", 1, pages_free=64)
    for n in range(4):
        assert only(Route, world.submit(f"r{n}", 40)).decode == world.refs["a2"]
        world.finish(f"r{n}")
        world.report("a2", n + 2, pages_free=64)


def test_the_end_of_a_local_prefill_ends_its_queue() -> None:
    world = World()
    world.join("a1", Role.AGGREGATED)
    world.submit("r", 40)
    instance = world.core.fleet.instances["a1"]
    assert instance.prefill_work.remaining_us(0) == pytest.approx(40_000.0)
    world.outcome("a1", "r", OutcomeKind.PREFILL_DONE)
    assert (instance.prefill_work.remaining_us(0), instance.booked_tokens, instance.booked_rows) == (0.0, 0, 1)


# -- memory


def siblings(world: World, count: int, *, prefix_blocks: int = 20) -> list[Route]:
    hashes = chain("a", prefix_blocks)
    tokens = (prefix_blocks + 1) * BLOCK_SIZE
    return [
        only(Route, world.submit(f"r{n}", tokens, 2, block_hashes=[*hashes, *chain(f"own{n}", 1)]))
        for n in range(count)
    ]


def test_pages_of_a_prefix_in_use_are_booked_once() -> None:
    world = World()
    world.join("a1", Role.AGGREGATED)
    siblings(world, 3)
    assert world.booked()["a1"][1] == 20 + 3 * 2
    world.finish("r0")
    assert world.booked()["a1"][1] == 20 + 2 * 2


def test_a_prefix_that_is_only_cached_needs_room_again() -> None:
    world = World()
    world.join("a1", Role.AGGREGATED, pages_total=30)
    world.publish("a1", 1, chain("a", 20))
    siblings(world, 1)
    assert world.booked()["a1"][1] == 22


@pytest.mark.parametrize(("pages_active", "decode"), [(2_600, "a1"), (4_000, None)])
def test_a_request_waits_for_room_where_its_prefix_is_rather_than_compute_it_elsewhere(
    pages_active: int, decode: str | None
) -> None:
    """A little at the instance, whose turn comes soon; else here, so that the choice stays open."""
    world = World()
    world.join("a1", Role.AGGREGATED, pages_total=2_600, max_model_len=10_000)
    siblings(world, 1, prefix_blocks=2_000)
    world.join("a2", Role.AGGREGATED, pages_total=2_600, max_model_len=10_000)
    world.report("a1", 1, pages_active=pages_active)
    decisions = world.submit("late", 8_004, 2, block_hashes=[*chain("a", 2_000), *chain("late", 1)])
    assert [each.decode.uuid for each in decisions if isinstance(each, Route)] == [decode] * (decode is not None)


def test_beside_prefill_instances_nobody_waits_for_pages_at_a_decode_instance() -> None:
    world = World()
    world.join("p1", Role.PREFILL, pages_total=256)
    world.join("d1", Role.DECODE, pages_total=32)
    assert world.submit("r0", 100, 2)
    assert world.submit("r1", 60, 2) == []
    world.finish("r0")
    assert world.core.attempts_live == 1
