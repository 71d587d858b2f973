"""When dead instances start again, and who is given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.supervision import RETIRE_MARGIN_US, Absences, RestartLimits, Supervisor
from segue.manifest import Role

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
LIMITS = RestartLimits(stable_us=10_000, backoff_first_us=100, backoff_us_max=400, deaths_max=4)


def test_one_that_served_for_a_while_starts_again_at_once() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    supervisor.ready(["decode-0"], 0)
    assert supervisor.died("decode-0", 10_000) == 0
    assert supervisor.take_due(10_000) == ["decode-0"]


def test_one_that_dies_young_waits_twice_as_long_each_time() -> None:
    supervisor, waits, now_us = Supervisor(ROLES, LIMITS), [], 0
    for _ in range(4):
        wait_us = supervisor.died("decode-0", now_us)
        assert wait_us is not None
        assert supervisor.take_due(now_us + wait_us - 1) == []
        now_us += wait_us
        assert supervisor.take_due(now_us) == ["decode-0"]
        waits.append(wait_us)
    assert waits == [100, 200, 400, 400]


def test_crash_loop_is_given_up() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    for _ in range(4):
        supervisor.died("decode-0", 0)
        supervisor.take_due(1_000)
    assert supervisor.died("decode-0", 0) is None
    assert supervisor.given_up == ["decode-0"]
    assert supervisor.take_due(1 << 40) == []
    assert supervisor.awaited_deaths(["decode-0"]) == []


def test_serving_for_a_while_forgives_earlier_deaths() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    for _ in range(4):
        supervisor.died("decode-0", 0)
        supervisor.take_due(1_000)
    supervisor.ready(["decode-0"], 1_000)
    assert supervisor.died("decode-0", 11_000) == 0
    supervisor.take_due(11_000)
    assert supervisor.died("decode-0", 11_001) == 200


def test_death_is_taken_note_of_once() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    assert supervisor.awaited_deaths(["decode-0", "prefill-0"]) == ["decode-0", "prefill-0"]
    supervisor.died("decode-0", 0)
    assert supervisor.awaited_deaths(["decode-0", "prefill-0"]) == ["prefill-0"]


def give_up(supervisor: Supervisor, name: str) -> None:
    while supervisor.died(name, 0) is not None:
        supervisor.take_due(1 << 40)


def test_cluster_can_serve_while_one_decode_instance_is_left() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    give_up(supervisor, "prefill-0")
    give_up(supervisor, "decode-0")
    assert supervisor.can_serve
    give_up(supervisor, "decode-1")
    assert not supervisor.can_serve


def test_readiness_is_news_once_for_each_process() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    assert supervisor.ready(["decode-0"], 0) == ["decode-0"]
    assert supervisor.ready(["decode-0"], 1) == []
    supervisor.died("decode-0", 2)
    supervisor.take_due(1_000)
    assert supervisor.ready(["decode-0"], 1_001) == ["decode-0"]


def test_retired_instance_is_not_started_again_and_serves_nobody() -> None:
    supervisor = Supervisor({"decode-0": Role.DECODE}, LIMITS)
    supervisor.ready(["decode-0"], 0)
    assert supervisor.retire("decode-0", 0, drain_us=1_000)
    assert supervisor.awaited_deaths(["decode-0"]) == []
    assert supervisor.retired(["decode-0"]) == ["decode-0"]
    assert not supervisor.can_serve


def test_retired_instance_that_waits_for_its_restart_has_no_process_to_be_told() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    supervisor.died("decode-0", 0)
    assert not supervisor.retire("decode-0", 0, drain_us=1_000)
    assert supervisor.take_due(1 << 40) == []


def test_retired_instance_that_does_not_leave_is_named_when_its_time_is_up() -> None:
    supervisor = Supervisor(ROLES, LIMITS)
    supervisor.retire("decode-0", 0, drain_us=1_000)
    assert supervisor.overdue(1_000 + RETIRE_MARGIN_US - 1) == []
    assert supervisor.overdue(1_000 + RETIRE_MARGIN_US) == ["decode-0"]
    assert supervisor.overdue(1_001 + RETIRE_MARGIN_US) == []


def test_added_slot_is_kept_alive_like_the_first_ones_until_it_is_removed() -> None:
    supervisor = Supervisor({"decode-0": Role.DECODE}, LIMITS)
    supervisor.add("decode-1", Role.DECODE)
    assert supervisor.ready(["decode-1"], 0) == ["decode-1"]
    assert supervisor.died("decode-1", 20_000) == 0
    assert supervisor.take_due(20_000) == ["decode-1"]
    supervisor.remove("decode-1")
    give_up(supervisor, "decode-0")
    assert not supervisor.can_serve


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30_000)), max_size=40))
def test_given_up_exactly_after_too_many_young_deaths_in_a_row(lives: list[tuple[bool, int]]) -> None:
    supervisor, now_us, row = Supervisor(ROLES, LIMITS), 0, 0
    for serves, life_us in lives:
        if serves:
            supervisor.ready(["decode-0"], now_us)
        now_us += life_us
        row = 1 if serves and life_us >= LIMITS.stable_us else row + 1
        wait_us = supervisor.died("decode-0", now_us)
        assert (wait_us is None) == (row > LIMITS.deaths_max)
        if wait_us is None:
            return
        now_us += wait_us
        assert supervisor.take_due(now_us) == ["decode-0"]


def test_absent_for_too_long_is_hung_and_named_once() -> None:
    absences = Absences(absent_us_max=100)
    assert absences.observe(["a", "b"], ["a"], 0) == []
    assert absences.observe(["a", "b"], ["a"], 99) == []
    assert absences.observe(["a", "b"], ["a"], 100) == ["b"]
    assert absences.observe(["a", "b"], ["a"], 101) == []


def test_one_that_came_back_starts_over() -> None:
    absences = Absences(absent_us_max=100)
    absences.observe(["a"], [], 0)
    absences.observe(["a"], ["a"], 60)
    assert absences.observe(["a"], [], 110) == []


def test_one_that_still_starts_is_not_missed() -> None:
    assert Absences(absent_us_max=0).observe([], [], 0) == []


def test_nobody_is_judged_by_a_silent_conductor() -> None:
    absences = Absences(absent_us_max=100)
    absences.observe(["a"], [], 0)
    absences.forget()
    assert absences.observe(["a"], [], 120) == []
