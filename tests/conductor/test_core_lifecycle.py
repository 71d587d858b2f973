import msgspec
import pytest
from conductor_world import World, all_of, chain, manifest, only

from conductor.core.decisions import (
    AttemptFailed,
    CancelAttempt,
    Drain,
    HandoffComplete,
    Reject,
    Resync,
    Route,
)
from conductor.core.events import DrainRequested, InstanceDraining, InstanceJoined
from conductor.core.machine import ConductorCore
from conductor.core.policy import Refusal
from segue.ids import AttemptRef, InstanceRef
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

NOTHING = (0, 0, 0)


@pytest.fixture
def world() -> World:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    return world


# -- booking


def test_a_route_books_both_sides_at_once(world: World) -> None:
    only(Route, world.submit("r", tokens=16, max_tokens=8))
    assert world.booked() == {"p1": (16, 4, 1), "d1": (0, 5, 1)}


def test_the_prompt_leaves_the_queue_of_p_when_it_is_computed(world: World) -> None:
    world.submit("r")
    world.outcome("p1", "r", OutcomeKind.PREFILL_DONE)
    assert world.booked()["p1"] == (0, 4, 1)


def test_a_complete_handoff_frees_p_and_is_told_once(world: World) -> None:
    world.submit("r")
    world.outcome("p1", "r", OutcomeKind.PREFILL_DONE)
    only(HandoffComplete, world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE))
    assert world.booked() == {"p1": NOTHING, "d1": (0, 5, 1)}
    assert world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE) == []


def test_reports_of_the_two_sides_may_cross(world: World) -> None:
    world.submit("r")
    only(HandoffComplete, world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE))
    assert world.outcome("p1", "r", OutcomeKind.PREFILL_DONE) == []
    assert world.booked() == {"p1": NOTHING, "d1": (0, 5, 1)}


@pytest.mark.parametrize(
    ("reporter", "kind", "left"),
    [
        ("d1", OutcomeKind.EMPTY, {"p1": NOTHING, "d1": (0, 5, 1)}),
        ("p1", OutcomeKind.DONE_AT_P, {"p1": NOTHING, "d1": NOTHING}),
        ("d1", OutcomeKind.FINISHED, {"p1": (16, 4, 1), "d1": NOTHING}),
    ],
)
def test_each_outcome_releases_what_it_ends(
    world: World, reporter: str, kind: OutcomeKind, left: dict[str, tuple[int, int, int]]
) -> None:
    world.submit("r")
    world.outcome(reporter, "r", kind)
    assert world.booked() == left
    world.finish("r")
    assert world.booked() == {"p1": NOTHING, "d1": NOTHING}


def test_explanations_say_that_a_prefill_instance_was_let_go_and_how_attempts_ended(world: World) -> None:
    world.submit("let-go")
    world.submit("failed")
    world.outcome("d1", "let-go", OutcomeKind.EMPTY)
    world.outcome("d1", "failed", OutcomeKind.FAILED)
    world.finish("let-go", "length")
    failed, let_go = world.core.admission.log.recent(9)
    assert (let_go.prefill_let_go, let_go.ended) == (True, "length")
    assert (failed.prefill_let_go, failed.ended) == (False, "failed by d1: ")


def test_finishing_tells_only_the_sides_that_still_hold_something(world: World) -> None:
    world.submit("r")
    world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE)
    cancel = only(CancelAttempt, world.finish("r", "stop"))
    assert (cancel.ref, cancel.key, cancel.reason) == (world.refs["d1"], AttemptRef("r", 1), "stop")
    assert world.finish("r", "stop") == []


def test_outcomes_of_unknown_stale_or_foreign_attempts_are_counted_and_ignored(world: World) -> None:
    world.join("d2", Role.DECODE, pages_total=1)
    world.submit("r")
    for name, request_id, attempt in (("d1", "ghost", 1), ("d1", "r", 7), ("d2", "r", 1)):
        assert world.outcome(name, request_id, OutcomeKind.FAILED, attempt) == []
    assert world.core.counts["outcome of no live attempt"] == 3
    assert world.booked()["d1"] == (0, 5, 1)


def test_a_duplicate_arrival_changes_nothing(world: World) -> None:
    only(Route, world.submit("r"))
    assert world.submit("r") == []
    assert world.core.counts["duplicate arrival"] == 1


def test_a_new_attempt_supersedes_a_live_one(world: World) -> None:
    world.submit("r")
    decisions = world.submit("r", attempt=2)
    assert [cancel.key.attempt for cancel in all_of(CancelAttempt, decisions)] == [1, 1]
    assert [route.key.attempt for route in all_of(Route, decisions)] == [2]


def test_predicted_growth_follows_what_requests_generated(world: World) -> None:
    for n in range(20):
        world.submit(f"r{n}", tokens=16, max_tokens=100)
        world.outcome("d1", f"r{n}", OutcomeKind.FINISHED, tokens_generated=4)
        world.finish(f"r{n}")
    only(Route, world.submit("r", tokens=16, max_tokens=100))
    assert world.booked()["d1"] == (0, 5, 1)


# -- failures


def test_losing_an_instance_fails_its_attempts_once_and_tells_the_partner(world: World) -> None:
    world.submit("r")
    decisions = world.lose("d1")
    assert [failed.key for failed in all_of(AttemptFailed, decisions)] == [AttemptRef("r", 1)]
    assert "d1 was lost" in all_of(AttemptFailed, decisions)[0].reason
    assert [cancel.ref for cancel in all_of(CancelAttempt, decisions)] == [world.refs["p1"]]
    assert world.lose("d1") == []
    assert world.booked() == {"p1": NOTHING}


def test_losing_p_after_the_handoff_changes_nothing(world: World) -> None:
    world.submit("r")
    world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE)
    assert world.lose("p1") == []
    assert world.core.attempts_live == 1


def test_losing_the_finisher_before_its_last_words_arrived_fails_the_attempt(world: World) -> None:
    world.submit("r")
    world.outcome("p1", "r", OutcomeKind.DONE_AT_P)
    only(AttemptFailed, world.lose("p1"))


def test_a_refusal_plans_again_and_holds_off_without_blame(world: World) -> None:
    world.submit("r")
    decisions = world.outcome("d1", "r", OutcomeKind.REFUSED, reason="no pages")
    assert all_of(AttemptFailed, decisions)[0].reason == "refused by d1: no pages"
    assert [cancel.ref for cancel in all_of(CancelAttempt, decisions)] == [world.refs["p1"]]
    assert world.submit("r", attempt=2) == []
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    assert only(Route, world.wait(wakeup - world.now_us)).key.attempt == 2
    assert world.core._health.penalty_tokens(world.now_us, "d1") == 0


def test_a_refusal_that_p_passes_on_pauses_d(world: World) -> None:
    world.join("d2", Role.DECODE)
    refusing = only(Route, world.submit("r")).decode.uuid
    world.outcome("p1", "r", OutcomeKind.REFUSED, reason="no pages")
    again = only(Route, world.submit("r", attempt=2))
    assert (again.prefill, again.decode.uuid != refusing) == (None, True), "the other one can do both"
    assert world.core.fleet.instances[refusing].refused_until_us > 0


def test_an_attempt_that_an_instance_gave_up_by_itself_is_planned_again(world: World) -> None:
    world.submit("r")
    failed = all_of(AttemptFailed, world.outcome("d1", "r", OutcomeKind.CANCELLED, reason="lease expired"))
    assert [failure.reason for failure in failed] == ["cancelled by d1: lease expired"]


def test_a_last_word_of_a_lost_instance_is_ignored(world: World) -> None:
    world.submit("r")
    world.outcome("d1", "r", OutcomeKind.HANDOFF_COMPLETE)
    world.lose("p1")
    assert world.outcome("p1", "r", OutcomeKind.FAILED) == []
    assert world.core.attempts_live == 1


def test_a_new_incarnation_replaces_the_old_one_and_its_blocks(world: World) -> None:
    world.publish("d1", 1, chain("r", 4))
    world.submit("r")
    again = manifest("d1", Role.DECODE, ref=InstanceRef("d1", 2))
    decisions = world.step(InstanceJoined(manifest=again))
    assert [failed.key.request_id for failed in all_of(AttemptFailed, decisions)] == ["r"]
    assert world.core.index.match(chain("r", 4)) == {}
    assert world.lose("d1") == [], "the loss of the old incarnation comes too late"
    assert only(Route, world.submit("r", attempt=2)).decode == again.ref


def test_an_older_incarnation_cannot_replace_a_newer_one(world: World) -> None:
    world.step(InstanceJoined(manifest=manifest("d1", Role.DECODE, ref=InstanceRef("d1", 5))))
    assert world.step(InstanceJoined(manifest=manifest("d1", Role.DECODE, ref=InstanceRef("d1", 4)))) == []
    assert world.core.fleet.instances["d1"].ref.incarnation == 5


def test_an_instance_that_only_lost_its_connection_is_told_what_ended_meanwhile(world: World) -> None:
    world.submit("r")
    world.lose("d1")
    world.finish("r", "cancelled")
    cancel = only(CancelAttempt, world.join("d1", Role.DECODE))
    assert (cancel.ref, cancel.key) == (world.refs["d1"], AttemptRef("r", 1))


# -- waiting


def fill(world: World) -> None:
    for n in range(8):
        only(Route, world.submit(f"full{n}"))
        world.outcome("p1", f"full{n}", OutcomeKind.PREFILL_DONE)
        world.outcome("d1", f"full{n}", OutcomeKind.HANDOFF_COMPLETE)


def test_what_does_not_fit_waits_in_order_of_arrival(world: World) -> None:
    fill(world)
    assert world.submit("a") == []
    assert world.submit("b") == []
    assert only(Route, world.finish("full0")[1:]).key.request_id == "a"
    assert only(Route, world.finish("full1")[1:]).key.request_id == "b"


def test_the_more_urgent_goes_first_and_a_replanned_one_before_new_ones(world: World) -> None:
    fill(world)
    world.submit("late", priority=1)
    world.submit("new")
    world.submit("again", attempt=2)
    order = [all_of(Route, world.finish(f"full{n}"))[0].key.request_id for n in range(3)]
    assert order == ["again", "new", "late"]


def test_a_large_head_is_not_passed_by_small_ones(world: World) -> None:
    world.core.fleet.instances["d1"].others_pages = 55
    assert world.submit("large", tokens=40) == []
    assert world.submit("small", tokens=4) == []


def test_a_full_queue_rejects_with_reason_resource_and_retry_after() -> None:
    world = World(ConductorCore(queue_max=2))
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE, max_num_seqs=1)
    for n in range(3):
        world.submit(f"r{n}")
    reject = only(Reject, world.submit("r3"))
    assert (reject.code, reject.resource, reject.message) == ("overloaded", "queue", "2 requests are waiting")
    assert reject.retry_after_ms > 0


def test_a_policy_that_will_not_take_a_request_rejects_it_with_reason_resource_and_retry_after() -> None:
    class Unwilling:
        def rank(self, *_: object) -> Refusal:
            return Refusal(reason="it would be late", resource="prefill", retry_after_ms=700)

    world = World(ConductorCore(policy=Unwilling()))
    world.join("p", Role.PREFILL)
    world.join("d", Role.DECODE)
    reject = only(Reject, world.submit("a"))
    assert (reject.code, reject.message) == ("overloaded", "it would be late")
    assert (reject.resource, reject.retry_after_ms) == ("prefill", 700)
    assert world.core.requests_queued == 0


def test_a_finished_request_leaves_the_queue(world: World) -> None:
    fill(world)
    world.submit("a")
    assert world.finish("a", "cancelled") == []
    assert world.core.requests_queued == 0


def test_the_clients_deadline_ends_the_wait(world: World) -> None:
    fill(world)
    world.submit("a", deadline_us=5_000)
    assert world.core.next_wakeup() == 5_000
    assert world.wait(4_999) == []
    assert only(Reject, world.wait(1)).code == "deadline_exceeded"


def test_the_longest_wait_ends_in_overloaded(world: World) -> None:
    fill(world)
    world.submit("a")
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    assert only(Reject, world.wait(wakeup)).code == "overloaded"


def test_waiting_requests_are_told_when_the_last_instance_is_lost_but_running_streams_wait(world: World) -> None:
    fill(world)
    world.submit("new")
    world.submit("stream", attempt=2)
    rejects = all_of(Reject, world.lose("d1"))
    assert [(reject.key.request_id, reject.code) for reject in rejects] == [("new", "unavailable")]
    assert only(Route, world.join("d1", Role.DECODE, ref=InstanceRef("d1", 2))[-1:]).key.request_id == "stream"


def test_work_of_other_conductors_counts_as_load(world: World) -> None:
    world.report("d1", 1, running=8)
    assert world.submit("a") == []
    only(Route, world.report("d1", 2, running=7))


def test_a_report_of_our_own_work_is_not_counted_twice(world: World) -> None:
    for n in range(7):
        only(Route, world.submit(f"r{n}"))
        world.outcome("p1", f"r{n}", OutcomeKind.PREFILL_DONE)
        world.outcome("d1", f"r{n}", OutcomeKind.HANDOFF_COMPLETE)
    world.report("d1", 1, running=7, pages_active=42)
    only(Route, world.submit("eighth"))


# -- drain and resync


def test_a_drain_is_passed_on_once_and_keeps_new_work_away(world: World) -> None:
    world.submit("r")
    assert only(Drain, world.step(DrainRequested(uuid="d1"))).ref == world.refs["d1"]
    assert world.step(DrainRequested(uuid="d1")) == []
    assert only(Reject, world.submit("new")).message == "no decode instance serves toy"
    assert world.core.attempts_live == 1, "running requests go on"


def test_an_instance_that_says_it_drains_gets_no_new_work(world: World) -> None:
    world.join("d2", Role.DECODE)
    world.step(InstanceDraining(ref=world.refs["d2"]))
    assert {only(Route, world.submit(f"r{n}")).decode.uuid for n in range(2)} == {"d1"}


def test_a_gap_asks_for_the_missing_events_and_asks_again(world: World) -> None:
    world.publish("p1", 1, chain("a", 1))
    resync = only(Resync, world.publish("p1", 3, chain("a", 3)))
    assert (resync.ref, resync.sequence_seen) == (world.refs["p1"], 1)
    assert world.publish("p1", 4, chain("a", 4)) == [], "one question at a time"
    wakeup = world.core.next_wakeup()
    assert wakeup is not None
    only(Resync, world.wait(wakeup))
    world.publish("p1", 5, chain("a", 2), snapshot=True)
    assert world.core.index.match(chain("a", 4)) == {"p1": 2}
    assert world.core.next_wakeup() is None


def test_a_gap_seen_in_a_load_report_asks_too(world: World) -> None:
    only(Resync, world.report("p1", 9))


def test_decisions_are_plain_records_that_survive_the_wire(world: World) -> None:
    route = only(Route, world.submit("r"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(route), type=Route) == route
