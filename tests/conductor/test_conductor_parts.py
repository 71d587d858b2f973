"""The smaller pure parts of the Conductor, each on its own."""

from random import Random

import msgspec
import pytest
from conductor_world import manifest, request
from front_process import CARD
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.admission_queue import WAIT_US_MAX, AdmissionQueue
from conductor.core.growth import GROWTH_TOKENS_DEFAULT, LENGTHS_KEPT, QuantileGrowth
from conductor.core.health import HALF_LIFE_US, Health, HealthBook
from conductor.core.rendezvous import stable_hash, weight
from conductor.core.resync import RETRY_US, ResyncSchedule
from conductor.core.throughput import PlacementRate
from conductor.registry import CARDS_MAX, Registry
from conductor.rpc_workers import OUTGOING_MAX, Session
from segue.ids import InstanceRef
from segue.limits import INSTANCES_MAX
from segue.manifest import Role

P1 = manifest("p1", Role.PREFILL)


# -- growth


def test_growth_is_a_default_until_enough_is_known() -> None:
    growth = QuantileGrowth()
    growth.learn(3)
    assert growth.predict(0, 10_000) == GROWTH_TOKENS_DEFAULT
    assert growth.predict(0, 5) == 5


def test_growth_is_the_quantile_of_those_that_went_on_longer() -> None:
    growth = QuantileGrowth()
    for length in [10] * 90 + [1000] * 90:
        growth.learn(length)
    assert growth.predict(0, 10_000) == 1000
    assert growth.predict(500, 10_000) == 500


@settings(deadline=None)
@given(st.integers(0, 100), st.integers())
def test_growth_forgets_the_oldest(too_many: int, seed: int) -> None:
    growth = QuantileGrowth()
    lengths = Random(seed).choices(range(1, 50), k=LENGTHS_KEPT + too_many)
    for length in lengths:
        growth.learn(length)
    assert growth._sorted == sorted(lengths[-LENGTHS_KEPT:])


# -- health


def test_failures_fade_and_successes_heal() -> None:
    health = Health()
    for _ in range(4):
        health.fail(0)
    assert health.score(0) == 4
    assert health.score(HALF_LIFE_US) == pytest.approx(2)
    health.succeed(HALF_LIFE_US)
    assert health.score(HALF_LIFE_US) == pytest.approx(1)


def test_the_book_of_failures_is_bounded_and_keeps_the_worst() -> None:
    book = HealthBook()
    book.fail(0, "bad")
    book.fail(0, "bad")
    for n in range(2 * HealthBook.KEYS_MAX):
        book.fail(0, f"pair{n}", "d")
    assert len(book._entries) <= HealthBook.KEYS_MAX
    assert book.penalty_tokens(0, "bad") > 0


# -- rendezvous


def test_an_instance_that_leaves_moves_only_its_own_keys() -> None:
    instances = {name: stable_hash(name.encode()) for name in ("a", "b", "c", "d")}

    def owner(key: int, names: dict[str, int]) -> str:
        return max(names, key=lambda name: weight(key, names[name]))

    keys = [stable_hash(bytes([n])) for n in range(200)]
    before = {key: owner(key, instances) for key in keys}
    without_b = {name: hashed for name, hashed in instances.items() if name != "b"}
    assert all(owner(key, without_b) == name for key, name in before.items() if name != "b")
    assert min(list(before.values()).count(name) for name in instances) > 25


def test_hashes_are_the_same_in_every_process() -> None:
    assert stable_hash(b"segue") == 0x8387D17054106D97


# -- queue, resync, rate


def test_the_queue_expires_in_order_of_deadlines() -> None:
    queue = AdmissionQueue()
    queue.push(request("slow"), 0)
    queue.push(request("fast", deadline_us=10), 0)
    queue.push(request("gone", deadline_us=5), 0)
    queue.remove("gone")
    assert queue.next_expiry() == 10
    assert [waiting.request.request_id for waiting in queue.expired(10)] == ["fast"]
    assert queue.next_expiry() == WAIT_US_MAX
    queue.check()


def test_a_resync_is_asked_for_at_growing_intervals() -> None:
    schedule = ResyncSchedule()
    schedule.want("p1", 0)
    assert schedule.take_due(0) == ["p1"]
    assert schedule.next_due() == RETRY_US
    assert schedule.take_due(RETRY_US) == ["p1"]
    assert schedule.next_due() == 3 * RETRY_US
    schedule.settle("p1")
    assert schedule.next_due() is None


def test_retry_after_is_the_wait_at_the_recent_rate() -> None:
    rate = PlacementRate()
    assert rate.retry_after_ms(10) == 1000
    for now_us in range(0, 10_000_000, 50_000):
        rate.placed(now_us)
    assert rate.retry_after_ms(40) == pytest.approx(2000, rel=0.01)
    assert rate.retry_after_ms(10**9) == 30_000


# -- registry


def test_a_member_that_was_heard_in_time_is_not_silent() -> None:
    registry = Registry()
    registry.add(P1, 0)
    registry.heard(P1.ref, 2_000_000)
    assert registry.silent(5_000_000) == []
    assert registry.silent(5_000_001) == [P1.ref]


def test_time_in_which_nobody_could_be_heard_makes_nobody_silent() -> None:
    registry = Registry()
    registry.add(P1, 0)
    registry.excuse(6_000_000, 8_000_000)
    assert registry.silent(9_000_000) == []
    assert registry.silent(9_000_001) == [P1.ref]


def test_a_newer_incarnation_is_not_replaced_by_an_older_one() -> None:
    registry = Registry()
    registry.add(msgspec.structs.replace(P1, ref=InstanceRef("p1", 5)), 0)
    assert "newer incarnation" in (registry.refusal(P1) or "")


def test_members_are_bounded() -> None:
    registry = Registry()
    for n in range(INSTANCES_MAX):
        registry.add(msgspec.structs.replace(P1, ref=InstanceRef(f"u{n}", 1), name=f"n{n}"), 0)
    assert registry.refusal(P1) == f"{INSTANCES_MAX} instances are registered"


def test_cards_of_models_that_nobody_serves_are_dropped_first() -> None:
    registry = Registry()
    registry.add_card(CARD)
    registry.add(P1, 0)
    for n in range(2 * CARDS_MAX):
        registry.add_card(msgspec.structs.replace(CARD, digest=f"d{n}"))
    assert registry.card("card") == CARD
    assert registry.card("d0") is None


async def test_a_worker_that_does_not_read_is_given_up() -> None:
    session = Session()
    for _ in range(OUTGOING_MAX + 1):
        session.drain()
    assert session.closed_because == f"{OUTGOING_MAX} messages were not read"
