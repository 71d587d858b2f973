import pytest
from conductor_world import World, all_of, chain, only

from conductor.core.decisions import AttemptFailed, Reject, Route
from segue.kv_layout import KvLayout
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

OTHER_BLOCK_SIZE = KvLayout(layers=1, kv_heads=1, head_dim=4, block_size=8, dtype="float32")


@pytest.fixture
def world() -> World:
    world = World()
    for name in ("p1", "p2", "p3"):
        world.join(name, Role.PREFILL)
    for name in ("d1", "d2"):
        world.join(name, Role.DECODE)
    return world


def test_the_longest_usable_prefix_wins_on_idle_instances(world: World) -> None:
    world.publish("p1", 1, chain("a", 2))
    world.publish("p3", 1, chain("a", 8))
    route = only(Route, world.submit("r", 40, block_hashes=chain("a", 10)))
    assert route.prefill == world.refs["p3"]
    assert route.tokens_cached_expected == 32


def test_a_queue_longer_than_the_prefix_saves_loses_to_an_idle_instance(world: World) -> None:
    world.publish("p1", 1, chain("a", 2))
    only(Route, world.submit("hot", 100, block_hashes=chain("a", 25)))
    assert world.booked()["p1"][0] == 92
    route = only(Route, world.submit("r", 16, block_hashes=[*chain("a", 2), *chain("b", 2)]))
    assert route.prefill != world.refs["p1"]


def test_siblings_of_a_prefix_that_is_being_computed_go_to_the_same_instance(world: World) -> None:
    first = only(Route, world.submit("r1", 41, block_hashes=chain("new", 10)))
    second = only(Route, world.submit("r2", 41, block_hashes=chain("new", 10)))
    assert second.prefill == first.prefill
    assert second.tokens_cached_expected == 40


def test_a_hot_prefix_spreads_when_its_holder_has_a_queue(world: World) -> None:
    world.publish("p1", 1, chain("hot", 10))
    targets = set()
    for n in range(6):
        hashes = [*chain("hot", 10), *chain(f"own{n}", 10)]
        targets |= {route.prefill for route in all_of(Route, world.submit(f"r{n}", 80, block_hashes=hashes))}
    assert len(targets) == 3


def test_decode_instances_are_filled_evenly(world: World) -> None:
    decodes = [only(Route, world.submit(f"r{n}")).decode.uuid for n in range(4)]
    assert sorted(decodes) == ["d1", "d1", "d2", "d2"]


def test_a_decode_instance_that_holds_the_prompt_is_preferred_and_books_no_prefill(world: World) -> None:
    world.publish("d2", 1, chain("a", 10))
    route = only(Route, world.submit("r", 41, block_hashes=chain("a", 10)))
    assert route.decode == world.refs["d2"]
    assert route.prefill is not None
    assert world.booked()[route.prefill.uuid][0] == 0


def test_requests_that_share_a_prefix_book_its_pages_once() -> None:
    """A pool of 30 pages holds five prompts of 12 blocks when they share ten of them, and only two when they do not."""
    world = World()
    world.join("a1", Role.AGGREGATED, pages_total=30)
    shared = [[*chain("hot", 10), *chain(f"own{n}", 2)] for n in range(5)]
    for n, hashes in enumerate(shared):
        assert all_of(Route, world.submit(f"r{n}", 48, max_tokens=4, block_hashes=hashes)), f"request {n} waits"
    assert world.booked()["a1"][1] == 13 + 4 * 3
    assert not all_of(Route, world.submit("other", 48, max_tokens=4, block_hashes=chain("cold", 12)))


def test_a_full_hit_still_computes_the_last_token(world: World) -> None:
    world.publish("p1", 1, chain("a", 4))
    route = only(Route, world.submit("r", 16, block_hashes=chain("a", 4)))
    assert route.prefill == world.refs["p1"]
    assert route.tokens_cached_expected == 15


def test_ties_are_broken_the_same_way_by_every_conductor() -> None:
    def routes() -> list[object]:
        world = World()
        for name in ("p1", "p2", "p3", "p4", "p5", "p6"):
            world.join(name, Role.PREFILL)
        world.join("d1", Role.DECODE, max_num_seqs=1)
        picked = []
        for n in range(12):
            picked.append(only(Route, world.submit(f"r{n}")).prefill)
            world.finish(f"r{n}")
        return picked

    first = routes()
    assert first == routes()
    assert len(set(first)) > 2, "different prefixes prefer different instances"


def test_an_aggregated_instance_prefills_locally() -> None:
    world = World()
    world.join("a1", Role.AGGREGATED)
    route = only(Route, world.submit("r"))
    assert (route.prefill, route.decode) == (None, world.refs["a1"])
    assert world.booked() == {"a1": (16, 5, 1)}


def test_a_decode_instance_prefills_locally_only_without_any_prefill_instance() -> None:
    world = World()
    world.join("d1", Role.DECODE)
    assert only(Route, world.submit("r1")).prefill is None
    world.join("p1", Role.PREFILL)
    assert only(Route, world.submit("r2")).prefill == world.refs["p1"]


def test_an_incompatible_pair_is_refused_with_its_reason() -> None:
    world = World()
    world.join("p1", Role.PREFILL, layout=OTHER_BLOCK_SIZE)
    world.join("d1", Role.DECODE)
    reject = only(Reject, world.submit("r"))
    assert reject.code == "unavailable"
    assert "block size differs: p1 has 8, d1 has 4" in reject.message


def test_only_compatible_instances_are_paired_when_a_strange_one_is_idle() -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    world.join("odd", Role.PREFILL, layout=OTHER_BLOCK_SIZE)
    routes = [route for n in range(5) for route in all_of(Route, world.submit(f"r{n}"))]
    assert {route.prefill for route in routes} == {world.refs["p1"]}


def test_an_unknown_model_and_a_model_without_instances_differ() -> None:
    world = World()
    assert only(Reject, world.submit("r1")).code == "model_not_found"
    world.join("d1", Role.DECODE)
    world.lose("d1")
    assert only(Reject, world.submit("r2")).code == "unavailable"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "field"), [(160, 1, "prompt"), (159, 1, None), (100, 61, "max_tokens"), (100, 60, None)]
)
def test_a_request_that_could_never_fit_names_field_and_limit(tokens: int, max_tokens: int, field: str | None) -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE, pages_total=40)
    world.join("d2", Role.DECODE, pages_total=10)
    decisions = world.submit("r", tokens, max_tokens)
    if field is None:
        assert only(Route, decisions).decode == world.refs["d1"]
    else:
        reject = only(Reject, decisions)
        assert (reject.code, reject.field) == ("invalid_value", field)
        assert "160" in reject.message or "60" in reject.message


def test_an_instance_that_fails_at_once_does_not_attract_everything(world: World) -> None:
    chosen = []
    for n in range(12):
        route = only(Route, world.submit(f"r{n}"))
        chosen.append(route.prefill)
        if route.prefill == world.refs["p1"]:
            failed = all_of(AttemptFailed, world.outcome("p1", f"r{n}", OutcomeKind.FAILED, reason="boom"))
            assert failed[0].reason == "failed by p1: boom"
    assert 1 <= chosen.count(world.refs["p1"]) <= 2, "though nothing ever waits there"


def test_a_failed_instance_is_tried_again_after_a_while(world: World) -> None:
    world.publish("p1", 1, chain("a", 4))
    only(Route, world.submit("r1", block_hashes=chain("a", 4)))
    world.outcome("p1", "r1", OutcomeKind.FAILED)
    assert only(Route, world.submit("r2", block_hashes=chain("a", 4))).prefill != world.refs["p1"]
    world.finish("r2")
    world.wait(600_000_000)
    assert only(Route, world.submit("r3", block_hashes=chain("a", 4))).prefill == world.refs["p1"]


def test_a_fresh_instance_gets_work_but_not_all_of_it(world: World) -> None:
    world.now_us = 60_000_000
    for n in range(3):
        only(Route, world.submit(f"busy{n}", tokens=60))
    world.join("fresh", Role.PREFILL)
    prefills = [only(Route, world.submit(f"r{n}", tokens=8)).prefill for n in range(4)]
    assert prefills.count(world.refs["fresh"]) == 1, "though it stays the least loaded"


def test_a_broken_link_is_held_against_the_pair() -> None:
    world = World()
    world.join("p1", Role.PREFILL)
    for name in ("d1", "d2"):
        world.join(name, Role.DECODE)
    partners = []
    for n in range(20):
        route = only(Route, world.submit(f"r{n}"))
        partners.append(route.decode.uuid)
        if route.decode == world.refs["d1"]:
            world.outcome("p1", f"r{n}", OutcomeKind.FAILED, reason="connection refused")
        else:
            world.outcome("d2", f"r{n}", OutcomeKind.HANDOFF_COMPLETE)
            world.finish(f"r{n}")
    assert partners.count("d1") <= 2
