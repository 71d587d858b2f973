"""What the core learns from outcomes and KV events, and that its placements are made by it."""

from __future__ import annotations

import pytest
from conductor_world import BLOCK_SIZE, COST, World, chain, only

from conductor.core.beliefs import Beliefs
from conductor.core.decisions import Route
from conductor.core.events import KvPublished
from conductor.core.links import LinkBook
from conductor.core.machine import ConductorCore
from segue.cost_model import LinkCost
from segue.kv_events import BlocksRemoved, KvEventBatch
from segue.kv_layout import KvLayout
from segue.manifest import Role
from segue.online_cost import REFIT_ROWS
from segue.worker_messages import OutcomeKind


def evict(world: World, name: str, sequence: int, hashes: list[bytes]) -> None:
    world.step(KvPublished(batch=KvEventBatch(world.refs[name], sequence, [BlocksRemoved(hashes)])))


# -- what an evicted block is worth


def test_a_prompt_that_asks_for_evicted_blocks_makes_cached_ones_worth_more() -> None:
    world = World()
    world.join("a1", Role.AGGREGATED)
    world.publish("a1", 1, chain("a", 8))
    evict(world, "a1", 2, chain("a", 8)[4:])
    reuse = world.core.beliefs.reuse
    before = reuse.share(4)
    world.submit("other", 32)
    assert reuse.share(4) == before
    world.submit("again", 34, block_hashes=chain("a", 8))
    assert reuse.share(4) > before


def test_a_prompt_that_waits_misses_its_blocks_once() -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE, pages_total=16)
    world.publish("p1", 1, chain("a", 8))
    evict(world, "p1", 2, chain("a", 8))
    world.submit("first", 48)
    assert world.submit("again", 34, block_hashes=chain("a", 8)) == []
    missed = world.core.beliefs.reuse.share(1)
    world.report("d1", 1)
    assert world.core.requests_queued == 1
    assert world.core.beliefs.reuse.share(1) == missed


# -- links


def handed_over(world: World, request_id: str, tokens: int, *, compute_us: int, tail_us: int) -> None:
    route = only(Route, world.submit(request_id, tokens))
    assert route.prefill == world.refs["p1"]
    world.outcome("p1", request_id, OutcomeKind.PREFILL_STARTED)
    world.now_us += compute_us
    world.outcome("p1", request_id, OutcomeKind.PREFILL_DONE)
    world.now_us += tail_us
    world.outcome("d1", request_id, OutcomeKind.HANDOFF_COMPLETE)
    world.outcome("d1", request_id, OutcomeKind.FINISHED)
    world.finish(request_id)


@pytest.mark.parametrize(
    ("compute_us", "tail_us"),
    [
        pytest.param(200_000, 64_000, id="the last chunk takes the tail"),
        pytest.param(32_000, 160_000, id="a slow link is still busy with what came first"),
    ],
)
def test_the_rate_of_a_link_is_learned_from_hand_offs(compute_us: int, tail_us: int) -> None:
    """96 tokens, 32 of them in the last chunk: 2 ms a token either way."""
    links = LinkBook(LinkCost(latency_us=0.0, bytes_per_us=1e4))
    world = World(ConductorCore(beliefs=Beliefs(cost=COST, links=links)))
    huge = KvLayout(layers=64, kv_heads=8, head_dim=256, block_size=BLOCK_SIZE, dtype="float32")
    world.join("p1", Role.PREFILL, layout=huge)
    world.join("d1", Role.DECODE, layout=huge)
    for n in range(30):
        handed_over(world, f"r{n}", 96, compute_us=compute_us, tail_us=tail_us)
    token_bytes = huge.page_bytes / BLOCK_SIZE
    assert links.us("p1", "d1", token_bytes) == pytest.approx(2_000.0, rel=0.1)


def test_an_attempt_that_ends_before_its_hand_off_leaves_no_transfer() -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    world.submit("r", 96)
    world.outcome("p1", "r", OutcomeKind.PREFILL_STARTED)
    world.finish("r")
    assert len(world.core._transfers) == 0


# -- costs


def computed(world: World, request_id: str, tokens: int, us: int) -> None:
    world.submit(request_id, tokens)
    world.outcome("p1", request_id, OutcomeKind.PREFILL_STARTED)
    world.now_us += us
    world.outcome("p1", request_id, OutcomeKind.PREFILL_DONE)
    world.outcome("d1", request_id, OutcomeKind.HANDOFF_COMPLETE)
    world.outcome("d1", request_id, OutcomeKind.FINISHED)
    world.finish(request_id)


def test_placements_are_made_by_costs_that_were_learned() -> None:
    """The core is told a millisecond a token and sees five."""
    world = World(ConductorCore(cost=COST))
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    for n in range(REFIT_ROWS + 1):
        tokens = 20 + 4 * (n % 16)
        computed(world, f"r{n}", tokens, tokens * 5_000)
    world.submit("next", 40)
    (predicted_us,) = world.core.fleet.instances["p1"].prefill_work._waiting.values()
    assert predicted_us == pytest.approx(200_000.0, rel=0.05)


def test_a_prompt_that_shared_its_instance_with_decode_steps_says_nothing_of_what_a_prompt_costs() -> None:
    world = World(ConductorCore(cost=COST))
    world.join("a1", Role.AGGREGATED, max_model_len=0)
    world.submit("long", 40)
    world.outcome("a1", "long", OutcomeKind.PREFILL_DONE)
    for n in range(REFIT_ROWS + 1):
        tokens = 20 + 4 * (n % 16)
        world.submit(f"r{n}", tokens)
        world.now_us += tokens * 5_000
        world.outcome("a1", f"r{n}", OutcomeKind.PREFILL_DONE)
        world.outcome("a1", f"r{n}", OutcomeKind.FINISHED)
        world.finish(f"r{n}")
    world.submit("next", 40)
    (predicted_us,) = world.core.fleet.instances["a1"].prefill_work._waiting.values()
    assert predicted_us == pytest.approx(40_000.0)
