"""What a broken connection swallowed is found by exchanging lists of live attempts: at once, and without mistakes."""

from __future__ import annotations

import pytest
from handoff_pair_rig import TIMING, Pair
from test_handoff_pair import assert_nothing_left, prompt_of

from segue.handoff import DecodeState, HandoffTiming, PrefillState
from segue.handoff_links import PeerLinks, let_go
from segue.handoff_messages import Abort, Complete, DoneAtP, Heartbeat, PrefillDone
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import OutcomeKind
from worker_runtime import events as ev
from worker_runtime.toy_engine import toy_tokens

P, D = InstanceRef("p", 1), InstanceRef("d", 1)
R = AttemptRef("r", 1)


@pytest.fixture
def pair() -> Pair:
    """P is in the middle of a prompt of which it has sent the first pages."""
    made = Pair(chunk=8)
    made.submit(made.assign("r", prompt_of(20)))
    deliver_all(made)
    made.finish_plan(made.p)
    made.finish_move()
    deliver_all(made)
    assert made.p.core.states()[R] is PrefillState.SENDING
    assert made.d.core.states()[R] is DecodeState.RECEIVING
    return made


def deliver_all(pair: Pair) -> None:
    while pair.deliver():
        pass


def finish_p(pair: Pair) -> None:
    """P does what it has to do; what it says stays in the network."""
    while pair.finish_plan(pair.p) or pair.finish_move():
        pass


def break_connection(pair: Pair) -> None:
    """Everything on its way is lost; the new connection is noticed by P, which has dialled."""
    pair.network.clear()
    pair.now_us += 1
    pair.step(pair.p, ev.LinkRestored(pair.d.ref))
    deliver_all(pair)


def test_abort_of_p_that_was_lost_is_made_up_for_at_once(pair: Pair) -> None:
    pair.cancel(pair.p, R)
    finish_p(pair)
    assert [type(message) for message in pair.network] == [Abort]
    break_connection(pair)
    assert_nothing_left(pair)


def test_abort_of_d_that_was_lost_is_made_up_for_at_once(pair: Pair) -> None:
    pair.cancel(pair.d, R)
    assert [type(message) for message in pair.network] == [Abort]
    break_connection(pair)
    finish_p(pair)
    deliver_all(pair)
    assert_nothing_left(pair)


def test_end_at_p_that_was_lost_is_made_up_for_at_once() -> None:
    pair = Pair(chunk=8)
    key = pair.submit(pair.assign("r", prompt_of(20), max_tokens=1))
    while not any(isinstance(message, DoneAtP) for message in pair.network):
        assert pair.deliver() or pair.finish_plan(pair.p) or pair.finish_move()
    break_connection(pair)
    assert_nothing_left(pair)
    assert pair.generated(key) == toy_tokens(prompt_of(20), 1, seed=7)


def test_completion_that_was_lost_is_made_up_for_at_once(pair: Pair) -> None:
    finish_p(pair)
    while not any(isinstance(message, Complete) for message in pair.network):
        assert pair.deliver()
    assert pair.p.core.states()[R] is PrefillState.SENT
    break_connection(pair)
    assert R not in pair.p.core.states()
    assert pair.d.core.states()[R] is DecodeState.RUNNING
    pair.settle()
    assert pair.generated(R) == toy_tokens(prompt_of(20), 4, seed=7)


def test_broken_connection_alone_disturbs_nothing(pair: Pair) -> None:
    break_connection(pair)
    finish_p(pair)
    assert any(isinstance(message, PrefillDone) for message in pair.network)
    break_connection(pair)
    pair.settle()
    assert pair.generated(R) == toy_tokens(prompt_of(20), 4, seed=7)
    assert OutcomeKind.FAILED not in pair.outcomes[R]
    assert_nothing_left(pair)


def test_two_rounds_of_lists_follow_a_break_and_no_more(pair: Pair) -> None:
    """D's first answer is the first list that P can go by, P's second list the first that D can."""
    before = pair.messages_sent.count("Heartbeat")
    break_connection(pair)
    assert pair.messages_sent.count("Heartbeat") - before == 4


@pytest.mark.parametrize("from_d", [False, True])
def test_list_that_is_older_than_the_attempt_ends_nothing(*, from_d: bool) -> None:
    """It waits in the network while the attempt comes to be on both sides."""
    pair = Pair(chunk=8)
    pair.submit(pair.assign("warm", prompt_of(9)))
    pair.settle()
    pair.now_us += 1
    pair.step(pair.p, ev.LinkRestored(pair.d.ref))
    if from_d:
        pair.deliver()
    late, pair.network = pair.network, []
    assert [type(message) for message in late] == [Heartbeat]
    pair.now_us += 1
    key = pair.submit(pair.assign("r", prompt_of(20, salt=3)))
    deliver_all(pair)
    pair.now_us += 1
    pair.network += late
    deliver_all(pair)
    assert pair.p.core.states()[key] is PrefillState.COMPUTING
    pair.settle()
    assert pair.generated(key) == toy_tokens(prompt_of(20, salt=3), 4, seed=7)


def test_only_what_the_peer_was_known_to_have_can_be_missing() -> None:
    beat = Heartbeat(D, P, [AttemptRef("here", 1)], said_us=5, heard_us=10)
    known = {AttemptRef("here", 1): 3, AttemptRef("gone", 1): 9, AttemptRef("new", 1): 10, AttemptRef("asked", 1): None}
    assert let_go(beat, known) == [AttemptRef("gone", 1)]


def test_link_that_is_opened_again_believes_no_earlier_list() -> None:
    """It has forgotten what the peer had heard: 0 answers nothing."""
    links = PeerLinks(HandoffTiming(lease_us=1000))
    links.open(D, 1)
    links.heard_beat(Heartbeat(D, P, [], said_us=50, heard_us=0))
    assert links.beat(P, D, [], 7).heard_us == 50
    links.close(D)
    links.open(D, 8)
    assert links.beat(P, D, [], 9).heard_us == 0


def test_heartbeats_find_a_lost_end_without_any_break(pair: Pair) -> None:
    """Where a message is lost for another reason: within two heartbeats, not a whole lease."""
    pair.cancel(pair.p, R)
    finish_p(pair)
    pair.network.clear()
    for _ in range(2):
        pair.wait(TIMING.heartbeat_us)
        deliver_all(pair)
    assert_nothing_left(pair)
