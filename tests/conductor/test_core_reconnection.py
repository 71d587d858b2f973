"""A control stream breaks and comes back: what both sides still have of each other's work is compared."""

from __future__ import annotations

from conductor_world import World, all_of

from conductor.core.decisions import AttemptFailed, CancelAttempt, Decision, Route
from conductor.core.events import AttemptsHeld, InstanceAway, InstanceReturned
from segue.ids import AttemptRef
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

AWAY_US = 1_000_000


def pair() -> World:
    world = World()
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE)
    return world


def away(world: World, name: str) -> list[Decision]:
    return world.step(InstanceAway(ref=world.refs[name], away_us=AWAY_US))


def returned(world: World, name: str) -> list[Decision]:
    return world.step(InstanceReturned(ref=world.refs[name]))


def holds(world: World, name: str, *attempts: tuple[str, int]) -> list[Decision]:
    held = [AttemptRef(*attempt) for attempt in attempts]
    return world.step(AttemptsHeld(ref=world.refs[name], attempts=held))


def test_short_absence_ends_no_attempt() -> None:
    world = pair()
    world.submit("r")
    assert away(world, "d1") == []
    assert returned(world, "d1") == []
    assert holds(world, "d1", ("r", 1)) == []
    assert world.core.attempts_live == 1


def test_nothing_is_assigned_to_an_instance_that_is_away_and_all_of_it_when_it_is_back() -> None:
    world = pair()
    away(world, "d1")
    assert world.submit("r") == []
    assert world.core.requests_queued == 1
    [route] = all_of(Route, returned(world, "d1"))
    assert route.key == AttemptRef("r", 1)


def test_attempt_that_the_instance_does_not_have_is_planned_again() -> None:
    """Its assignment was swallowed by the break."""
    world = pair()
    world.submit("r")
    away(world, "d1")
    returned(world, "d1")
    decisions = holds(world, "d1")
    [failed] = all_of(AttemptFailed, decisions)
    assert failed.key == AttemptRef("r", 1)
    assert "d1 lost it" in failed.reason
    [cancel] = all_of(CancelAttempt, decisions)
    assert cancel.ref == world.refs["p1"], "the other side is told"
    assert world.core.attempts_live == 0
    assert world.booked()["d1"] == (0, 0, 0)


def test_attempt_that_nobody_waits_for_is_cancelled() -> None:
    """Its request ended while the instance could not be told."""
    world = pair()
    world.submit("r")
    away(world, "d1")
    world.finish("r", "cancelled")
    returned(world, "d1")
    [cancel] = all_of(CancelAttempt, holds(world, "d1", ("r", 1)))
    assert (cancel.ref, cancel.key) == (world.refs["d1"], AttemptRef("r", 1))


def test_attempt_of_an_earlier_plan_is_cancelled_and_the_present_one_goes_on() -> None:
    world = pair()
    world.submit("r")
    away(world, "p1")
    world.finish("r")
    world.submit("r", attempt=2)
    returned(world, "p1")
    decisions = holds(world, "p1", ("r", 1))
    assert [cancel.key for cancel in all_of(CancelAttempt, decisions)] == [AttemptRef("r", 1)]
    assert all_of(AttemptFailed, decisions) == []


def test_attempt_assigned_over_the_new_stream_is_not_missed() -> None:
    """The instance counted before it was told."""
    world = pair()
    away(world, "d1")
    returned(world, "d1")
    assert all_of(Route, world.submit("r"))
    assert holds(world, "d1") == []
    assert world.core.attempts_live == 1


def test_attempt_that_ended_there_by_an_outcome_said_again_is_not_missed() -> None:
    world = pair()
    world.submit("r")
    away(world, "d1")
    returned(world, "d1")
    world.outcome("d1", "r", OutcomeKind.FINISHED)
    assert all_of(AttemptFailed, holds(world, "d1")) == []


def test_conductor_that_was_started_again_cancels_what_its_predecessor_had_assigned() -> None:
    world = pair()
    [cancel] = all_of(CancelAttempt, holds(world, "d1", ("old", 3)))
    assert (cancel.ref, cancel.key) == (world.refs["d1"], AttemptRef("old", 3))


def test_instance_that_stays_away_is_lost_with_what_it_had() -> None:
    world = pair()
    world.submit("r")
    away(world, "d1")
    assert [failed.key for failed in all_of(AttemptFailed, world.lose("d1"))] == [AttemptRef("r", 1)]
