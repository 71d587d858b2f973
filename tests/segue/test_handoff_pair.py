"""The prefill and the decode core against each other: right tokens, and nothing left behind, whatever happens."""

from __future__ import annotations

import pytest
from handoff_pair_rig import BLOCK, TIMING, Pair

from segue.handoff import DecodeState, PrefillState
from segue.ids import AttemptRef
from segue.worker_messages import OutcomeKind
from worker_runtime import events as ev
from worker_runtime.toy_engine import toy_tokens


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 131 + position * 7 + 3) % 1000 for position in range(length)]


def assert_nothing_left(pair: Pair) -> None:
    assert not pair.p.core.live() and not pair.d.core.live()
    for side in (pair.p, pair.d):
        counts = side.pool.counts()
        assert (counts.active, counts.held, counts.quarantined) == (0, 0, 0)
        assert not side.planner.has_work()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 30])
def test_handed_off_tokens_equal_the_models(length: int, depth: int) -> None:
    pair = Pair(depth=depth)
    key = pair.submit(pair.assign("r", prompt_of(length), max_tokens=6))
    pair.settle()
    assert pair.generated(key) == toy_tokens(prompt_of(length), 6, seed=7)
    assert pair.finished[key] == "length"
    assert_nothing_left(pair)


def test_outcomes_tell_the_whole_way() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(17)))
    pair.settle()
    assert pair.outcomes[key] == [
        OutcomeKind.GRANTED,
        OutcomeKind.PREFILL_STARTED,
        OutcomeKind.PREFILL_DONE,
        OutcomeKind.HANDOFF_COMPLETE,
        OutcomeKind.FINISHED,
    ]


def test_first_token_leaves_before_the_transfer_ends() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(9)))
    while pair.deliver() or pair.finish_plan(pair.p):
        pass
    assert pair.p.moves
    assert pair.generated(key) == toy_tokens(prompt_of(9), 1, seed=7)


def test_pages_leave_after_every_chunk() -> None:
    pair = Pair(chunk=8)
    pair.submit(pair.assign("r", prompt_of(24)))
    while pair.deliver():
        pass
    pair.finish_plan(pair.p)
    assert [len(move.pages) for move in pair.p.moves] == [8 // BLOCK]
    assert pair.p.core.states()[AttemptRef("r", 1)] is PrefillState.SENDING


def test_nothing_is_computed_before_the_grant() -> None:
    pair = Pair()
    pair.submit(pair.assign("r", prompt_of(9)))
    assert pair.p.plans == 0
    pair.settle()


def test_finished_by_the_first_token_frees_both_sides() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(17), max_tokens=1))
    pair.settle()
    assert pair.finished[key] == "length"
    assert pair.generated(key) == toy_tokens(prompt_of(17), 1, seed=7)
    assert OutcomeKind.DONE_AT_P in pair.outcomes[key]
    assert OutcomeKind.FAILED not in pair.outcomes[key]
    assert_nothing_left(pair)


def test_pages_that_d_has_are_not_sent_again() -> None:
    pair = Pair()
    pair.submit(pair.assign("a", prompt_of(24)))
    pair.settle()
    longer = prompt_of(24) + prompt_of(8, salt=5)
    key = pair.submit(pair.assign("b", longer))
    moved = 0
    while pair.deliver() or pair.finish_plan(pair.p):
        moved = sum(len(move.pages) for move in pair.p.moves)
    assert moved == 8 // BLOCK
    pair.settle()
    assert pair.generated(key) == toy_tokens(longer, 4, seed=7)


def test_full_hit_at_d_lets_p_go_before_it_computes() -> None:
    pair = Pair()
    pair.submit(pair.assign("a", prompt_of(24)))
    pair.settle()
    key = pair.submit(pair.assign("b", prompt_of(24)))
    pair.settle()
    assert OutcomeKind.EMPTY in pair.outcomes[key]
    assert OutcomeKind.PREFILL_STARTED not in pair.outcomes[key]
    assert pair.generated(key) == toy_tokens(prompt_of(24), 4, seed=7)
    assert_nothing_left(pair)


def test_failed_page_is_recomputed_at_d_and_never_counted_as_arrived() -> None:
    pair = Pair(chunk=32)
    key = pair.submit(pair.assign("r", prompt_of(20)))
    while pair.deliver() or pair.finish_plan(pair.p):
        pass
    pair.finish_move(fail_after=2)
    pair.settle()
    assert pair.generated(key) == toy_tokens(prompt_of(20), 4, seed=7)
    assert_nothing_left(pair)


def test_d_without_room_refuses_and_p_lets_go() -> None:
    pair = Pair(pages_d=8, chunk=64)
    first = pair.submit(pair.assign("a", prompt_of(24), max_tokens=4))
    while pair.deliver():
        pass
    second = pair.submit(pair.assign("b", prompt_of(24, salt=1)))
    while pair.deliver():
        pass
    pair.wait(TIMING.grant_wait_us)
    while pair.deliver():
        pass
    assert OutcomeKind.REFUSED in pair.outcomes[second]
    assert second not in pair.p.core.states()
    pair.settle()
    assert pair.generated(first) == toy_tokens(prompt_of(24), 4, seed=7)


def test_waiting_grant_is_given_when_room_comes() -> None:
    pair = Pair(pages_d=8)
    keys = [pair.submit(pair.assign(name, prompt_of(24, salt), max_tokens=3)) for salt, name in enumerate("ab")]
    pair.settle()
    for salt, key in enumerate(keys):
        assert pair.generated(key) == toy_tokens(prompt_of(24, salt), 3, seed=7)


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("where", ["p", "d", "both"])
def test_cancel_at_any_moment_frees_both_sides(where: str, steps: int) -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(20), max_tokens=8))
    for step in range(steps):
        (pair.deliver, lambda: pair.finish_plan(pair.p), pair.finish_move, lambda: pair.finish_plan(pair.d))[step % 4]()
    if where in ("d", "both"):
        pair.cancel(pair.d, key)
    if where in ("p", "both"):
        pair.cancel(pair.p, key)
    pair.settle()
    assert_nothing_left(pair)


def test_cancel_that_overtakes_its_assign_leaves_a_tombstone() -> None:
    pair = Pair()
    assign = pair.assign("r", prompt_of(20))
    for side in (pair.p, pair.d):
        pair.cancel(side, AttemptRef("r", 0))
    pair.submit(assign)
    assert pair.outcomes[assign.key] == [OutcomeKind.CANCELLED, OutcomeKind.CANCELLED]
    assert_nothing_left(pair)


def test_grant_request_that_overtakes_the_assign_is_kept() -> None:
    pair = Pair()
    assign = pair.assign("r", prompt_of(20))
    pair.submit(assign, to_d=False)
    while pair.deliver():
        pass
    pair.submit(assign, to_p=False)
    assert pair.d.core.states()[assign.key] is DecodeState.GRANTED
    pair.settle()
    assert_nothing_left(pair)


def test_assign_that_never_reaches_d_ends_at_p() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(20)), to_d=False)
    pair.settle()
    assert OutcomeKind.FAILED in pair.outcomes[key]
    assert_nothing_left(pair)


def test_assign_that_never_reaches_p_ends_at_d_after_a_lease() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(20)), to_p=False)
    pair.settle()
    assert pair.outcomes[key] == [OutcomeKind.FAILED]
    assert_nothing_left(pair)


def test_heartbeats_keep_a_request_that_waits_longer_than_the_lease() -> None:
    pair = Pair(chunk=8)
    first = pair.submit(pair.assign("a", prompt_of(40)))
    waiting = pair.submit(pair.assign("b", prompt_of(20, salt=1)))
    for _ in range(30):
        pair.wait(TIMING.repeat_us)
        while pair.deliver():
            pass
    assert OutcomeKind.FAILED not in pair.outcomes[waiting]
    pair.settle()
    assert pair.generated(waiting) == toy_tokens(prompt_of(20, salt=1), 4, seed=7)
    assert pair.generated(first) == toy_tokens(prompt_of(40), 4, seed=7)


@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("which", ["p", "d"])
def test_restart_at_the_same_address_is_never_mistaken(which: str, steps: int) -> None:
    pair = Pair()
    pair.submit(pair.assign("r", prompt_of(20), max_tokens=8))
    for step in range(steps):
        (pair.deliver, lambda: pair.finish_plan(pair.p), pair.finish_move, lambda: pair.finish_plan(pair.d))[step % 4]()
    pair.restart(which)
    pair.settle()
    assert_nothing_left(pair)
    again = pair.submit(pair.assign("r", prompt_of(20), attempt=2))
    pair.settle()
    assert pair.generated(again) == toy_tokens(prompt_of(20), 4, seed=7)


def test_cancelled_pages_stay_quarantined_while_a_write_may_land() -> None:
    pair = Pair(chunk=32)
    key = pair.submit(pair.assign("r", prompt_of(20)))
    while pair.deliver() or pair.finish_plan(pair.p):
        pass
    pair.cancel(pair.d, key)
    assert pair.d.pool.counts().quarantined == 5
    pair.wait(3 * TIMING.lease_us)
    assert pair.d.pool.counts().quarantined == 5
    pair.finish_move()
    pair.settle()
    assert_nothing_left(pair)


def test_too_many_quarantined_pages_ask_for_a_restart() -> None:
    pair = Pair(chunk=32)
    key = pair.submit(pair.assign("r", prompt_of(20)))
    while pair.deliver() or pair.finish_plan(pair.p):
        pass
    pair.cancel(pair.d, key)
    pair.network.clear()
    pair.wait(2 * TIMING.lease_us)
    assert pair.restart_asked


def test_token_stream_is_cut_by_the_gateway_without_leftovers() -> None:
    pair = Pair()
    key = pair.submit(pair.assign("r", prompt_of(12), max_tokens=50))
    while len(pair.tokens[key]) < 5:
        assert pair.deliver() or pair.finish_move() or pair.finish_plan(pair.p) or pair.finish_plan(pair.d)
    pair.step(pair.d, ev.GatewayLost("gateway:1"))
    pair.settle()
    assert key not in pair.finished
    assert_nothing_left(pair)


def test_many_requests_share_both_sides() -> None:
    pair = Pair(pages_p=24, pages_d=40, chunk=16, depth=1)
    prompts = [prompt_of(5 + 3 * number, salt=number % 3) for number in range(12)]
    keys = [pair.submit(pair.assign(f"r{number}", prompt)) for number, prompt in enumerate(prompts)]
    pair.settle(leases=30)
    for key, prompt in zip(keys, prompts, strict=True):
        assert pair.generated(key) == toy_tokens(prompt, 4, seed=7)
    assert_nothing_left(pair)
