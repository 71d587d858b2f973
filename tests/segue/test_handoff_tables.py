"""The two local tables, their product, and tombstones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import InternalError
from segue.handoff import (
    DECODE_FINAL,
    DECODE_TABLE,
    JOINT,
    PREFILL_FINAL,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    HandoffTiming,
    PrefillEvent,
    PrefillState,
    Tombstones,
    decode_handoff,
    prefill_handoff,
)
from segue.ids import AttemptRef


def reachable(table: dict, start: object) -> set:  # type: ignore[type-arg]
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = {after for (before, _), after in table.items() if before is state} - seen
        seen |= following
        todo += following
    return seen


def test_every_state_is_reachable_and_only_final_ones_have_no_way_on() -> None:
    for table, start, final, states in (
        (PREFILL_TABLE, PrefillState.PLANNED, PREFILL_FINAL, PrefillState),
        (DECODE_TABLE, DecodeState.BOOKED, DECODE_FINAL, DecodeState),
    ):
        assert reachable(dict(table), start) == set(states)
        assert {state for state in states if all(before is not state for before, _ in table)} == final


def test_every_event_is_used() -> None:
    assert {event for _, event in PREFILL_TABLE} == set(PrefillEvent)
    assert {event for _, event in DECODE_TABLE} == set(DecodeEvent)


def test_the_named_paths_exist() -> None:
    prefill = prefill_handoff()
    for event in (PrefillEvent.GRANTED, PrefillEvent.FIRST_PAGES, PrefillEvent.ALL_MOVED, PrefillEvent.ACKNOWLEDGED):
        prefill.advance(event)
    assert prefill.state is PrefillState.RELEASED
    decode = decode_handoff()
    for event_d in (
        DecodeEvent.GRANT,
        DecodeEvent.FIRST_PAGES,
        DecodeEvent.ALL_LANDED,
        DecodeEvent.JOIN,
        DecodeEvent.END,
    ):
        decode.advance(event_d)
    assert decode.state is DecodeState.FREED


@given(st.sampled_from(PrefillEvent))
def test_illegal_event_is_an_error_and_leaves_the_state(event: PrefillEvent) -> None:
    handoff = prefill_handoff()
    if handoff.can(event):
        return
    with pytest.raises(InternalError):
        handoff.advance(event)
    assert handoff.state is PrefillState.PLANNED


def test_joint_table_covers_every_prefill_state() -> None:
    assert set(JOINT) == set(PrefillState)


def test_while_p_may_write_d_always_holds_the_pages() -> None:
    holding = {DecodeState.GRANTED, DecodeState.RECEIVING, DecodeState.ABORTING, DecodeState.QUARANTINED}
    for state in (PrefillState.COMPUTING, PrefillState.SENDING):
        assert JOINT[state] <= holding


def test_steps_of_one_side_that_leave_the_joint_table_need_the_other_sides_word() -> None:
    """Every pair is closed under P's moves, but for those that a message of D, or a grant by D, has to precede."""
    awaited = {PrefillEvent.GRANTED}
    for (before, event), after in PREFILL_TABLE.items():
        if event in awaited:
            continue
        lost = JOINT[before] - JOINT[after]
        allowed = {DecodeState.BOOKED} if before is PrefillState.PLANNED else set()
        assert lost <= allowed, f"{before} --{event}--> {after} would lose {lost}"


def test_holders_stop_before_the_granter_does() -> None:
    timing = HandoffTiming(lease_us=1000)
    assert timing.holder_us == 800
    assert timing.heartbeat_us * 3 < timing.holder_us


def test_tombstone_lasts_one_lease() -> None:
    tombstones = Tombstones(lease_us=10)
    tombstones.bury(AttemptRef("r", 1), "gone", now_us=5)
    assert tombstones.reason(AttemptRef("r", 1), 14) == "gone"
    assert tombstones.reason(AttemptRef("r", 2), 14) is None
    assert tombstones.reason(AttemptRef("r", 1), 15) is None
    assert len(tombstones) == 0


def test_attempt_zero_buries_every_attempt() -> None:
    tombstones = Tombstones(lease_us=10)
    tombstones.bury(AttemptRef("r", 0), "gone", now_us=0)
    assert tombstones.reason(AttemptRef("r", 7), 1) == "gone"


def test_tombstones_are_bounded() -> None:
    tombstones = Tombstones(lease_us=10, tombstones_max=3)
    for number in itertools.islice(itertools.count(), 9):
        tombstones.bury(AttemptRef(str(number), 1), "gone", now_us=0)
    assert len(tombstones) == 3
