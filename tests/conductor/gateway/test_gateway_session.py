from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.session import GAP_US_MAX, Session, State
from conductor.gateway.session_events import (
    AttemptFailed,
    Emit,
    End,
    HandoffComplete,
    Placed,
    Rejected,
    Replan,
    SessionSpec,
    Stopped,
    Submitted,
)
from conductor.gateway.testing import DECODE, toy_card
from conductor.gateway.text import TextCodec
from conductor.ports import Placement, ReceivedTokens
from segue import limits
from segue.errors import Cancelled, DeadlineExceeded, InternalError, InvalidField, Overloaded, Unavailable
from segue.plan import TokenLogprobs
from segue.sampling_params import SamplingParams

CODEC = TextCodec(toy_card())
EOS = CODEC.encode_now("<|im_end|>")[0]
PROMPT = 10


def make(*, max_tokens: int = 20, stops: Sequence[str] = (), deadline_us: int = 0, **sampling: object) -> Session:
    spec = SessionSpec(
        request_id="r",
        model="toy",
        prompt_ids=b"\x01\x00\x00\x00" * PROMPT,
        tokens_prompt=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrived_us=1000,
        deadline_us=deadline_us,
    )
    tokens_free = spec.sampling.min_tokens
    return Session(spec, CODEC.stream(stops, skip_special_tokens=True, tokens_free=tokens_free))


def running(**options: object) -> Session:
    session = make(**options)
    session.step(1100, [Submitted(1), Placed(1, Placement(prefill="p0", decode="d0"))])
    return session


def tokens(offset: int, ids: Sequence[int], *, attempt: int = 1, finish: str = "", **fields: object) -> ReceivedTokens:
    base = {"instance": "d0", "error": "", "tokens_cached": 0, "from_prefill": False, "queue_us": 0, "compute_us": 0}
    return ReceivedTokens(
        ref=DECODE,
        request_id="r",
        attempt=attempt,
        position=PROMPT + offset,
        token_ids=list(ids),
        finish=finish,
        **{"logprobs": None, **base, **fields},
    )


def text_of(decisions: Sequence[object]) -> str:
    return "".join(decision.text for decision in decisions if isinstance(decision, Emit))


def ids_of(decisions: Sequence[object]) -> list[int]:
    return [token_id for decision in decisions if isinstance(decision, Emit) for token_id in decision.token_ids]


def end_of(decisions: Sequence[object]) -> End:
    (end,) = [decision for decision in decisions if isinstance(decision, End)]
    return end


HELLO = CODEC.encode_now("hello world")


def test_tokens_become_text_and_the_reported_stop_ends_it_without_the_end_token() -> None:
    decisions = running().step(2000, [tokens(0, [*HELLO, EOS], finish="stop")])
    assert text_of(decisions) == "hello world"
    assert ids_of(decisions) == [*HELLO, EOS]
    assert end_of(decisions).reason == "stop"


def test_a_stop_token_that_is_not_special_is_not_shown_either() -> None:
    session = running(stop_token_ids=(HELLO[-1],))
    assert text_of(session.step(2000, [tokens(0, HELLO, finish="stop")])) == CODEC.decode(HELLO[:-1])


def test_the_length_ends_it_without_waiting_for_a_report() -> None:
    decisions = running(max_tokens=2).step(2000, [tokens(0, [*HELLO, *HELLO])])
    assert ids_of(decisions) == [*HELLO, *HELLO][:2]
    assert end_of(decisions).reason == "length"


def test_a_stop_string_cuts_text_and_count() -> None:
    session = running(stops=["lo"], max_tokens=30)
    letters = [CODEC.encode_now(letter)[0] for letter in "hello world"]
    decisions = session.step(2000, [tokens(0, letters)])
    assert text_of(decisions) == "hel"
    assert session.summary().tokens_generated == 5
    assert end_of(decisions).reason == "stop"


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    session = running(stops=["h"], min_tokens=2)
    letters = [CODEC.encode_now(letter)[0] for letter in "hahah"]
    assert text_of(session.step(2000, [tokens(0, letters)])) == "ha"
    assert session.summary().tokens_generated == 3


def test_held_text_is_released_at_the_end() -> None:
    session = running(stops=["world!"])
    assert text_of(session.step(2000, [tokens(0, HELLO, finish="length")])) == "hello world"


def test_a_replay_of_known_positions_emits_only_what_is_new() -> None:
    session = running()
    session.step(2000, [tokens(0, [1, 2])])
    assert ids_of(session.step(2100, [tokens(0, [1, 2, 3])])) == [3]


def test_a_replay_leaves_no_gap_behind() -> None:
    session = running()
    session.step(2000, [tokens(0, [1, 2]), tokens(0, [1, 2])])
    assert session.next_wakeup() is None


def test_tokens_of_a_plan_that_was_not_submitted_are_not_believed() -> None:
    session = running()
    session.step(2000, [AttemptFailed(1, "lost")])
    assert session.step(2100, [tokens(0, [1], attempt=2)]) == []


def test_tokens_past_the_last_position_are_dropped() -> None:
    session = running(max_tokens=3)
    assert session.step(2000, [tokens(3, [9, 9])]) == []
    assert session.next_wakeup() is None


def test_decodes_tokens_wait_for_the_first_one_of_prefill() -> None:
    session = running()
    assert session.step(2000, [tokens(1, [5, 6])]) == []
    assert ids_of(session.step(2100, [tokens(0, [4], from_prefill=True, instance="p0")])) == [4, 5, 6]


def test_a_finish_is_not_believed_before_every_token_is_there() -> None:
    session = running()
    assert session.step(2000, [tokens(1, [EOS], finish="stop")]) == []
    decisions = session.step(2100, [tokens(0, HELLO[:1])])
    assert end_of(decisions).reason == "stop"
    assert text_of(decisions) == CODEC.decode(HELLO[:1])


def test_a_gap_that_is_never_filled_fails_the_attempt() -> None:
    session = running()
    session.step(2000, [tokens(1, [5])])
    assert session.next_wakeup() == 2000 + GAP_US_MAX
    (replan,) = session.step(2000 + GAP_US_MAX, [])
    assert isinstance(replan, Replan) and replan.attempt == 2


def test_a_failed_attempt_is_planned_again_and_goes_on_where_it_was() -> None:
    session = running()
    session.step(2000, [tokens(0, [1, 2])])
    assert session.step(2100, [AttemptFailed(1, "lost")]) == [Replan(2, 0, "lost")]
    session.step(2200, [Submitted(2)])
    assert ids_of(session.step(2300, [tokens(2, [3], attempt=2)])) == [3]
    assert list(session.generated) == [1, 2, 3]


def test_a_late_token_of_an_earlier_attempt_is_never_used() -> None:
    session = running()
    session.step(2000, [AttemptFailed(1, "lost"), Submitted(2)])
    assert session.step(2100, [tokens(0, [9])]) == []
    assert session.stale == 1


def test_tokens_that_waited_for_a_gap_are_forgotten_with_their_attempt() -> None:
    session = running()
    session.step(2000, [tokens(1, [9]), AttemptFailed(1, "lost"), Submitted(2)])
    assert ids_of(session.step(2100, [tokens(0, [1], attempt=2)])) == [1]


def test_attempts_are_bounded_and_then_the_client_is_told() -> None:
    session = running()
    for attempt in range(1, limits.ATTEMPTS_MAX):
        session.step(2000, [AttemptFailed(attempt, "lost"), Submitted(attempt + 1)])
    end = end_of(session.step(3000, [AttemptFailed(limits.ATTEMPTS_MAX, "instance d9 is lost")]))
    assert isinstance(end.error, Unavailable) and "d9" in end.error.message


def test_attempts_that_brought_tokens_do_not_count_against_a_long_stream() -> None:
    """Each instance that serves it dies after a while: the stream goes on, and the first failures are forgotten."""
    session, size = running(max_tokens=2000), limits.PROGRESS_TOKENS
    for attempt in range(1, 3 * limits.ATTEMPTS_MAX):
        delivery = tokens((attempt - 1) * size, [65] * size, attempt=attempt)
        decisions = session.step(2000, [delivery, AttemptFailed(attempt, "lost")])
        assert [decision.delay_us for decision in decisions if isinstance(decision, Replan)] == [0]
        session.step(2000, [Submitted(attempt + 1)])
    session.check()


def test_attempts_that_bring_too_little_end_the_request() -> None:
    """One token an attempt: a request that kills what it touches would otherwise do so for each of its tokens."""
    session = running(max_tokens=2000)
    for attempt in range(1, limits.ATTEMPTS_MAX):
        session.step(2000, [tokens(attempt - 1, [65], attempt=attempt), AttemptFailed(attempt, "lost")])
        session.step(2000, [Submitted(attempt + 1)])
    end = end_of(session.step(3000, [AttemptFailed(limits.ATTEMPTS_MAX, "lost")]))
    assert isinstance(end.error, Unavailable)


def test_attempts_are_bounded_in_all() -> None:
    session, size = running(max_tokens=2000), limits.PROGRESS_TOKENS
    for attempt in range(1, limits.ATTEMPTS_TOTAL_MAX):
        session.step(2000, [tokens((attempt - 1) * size, [65] * size, attempt=attempt), AttemptFailed(attempt, "lost")])
        session.step(2000, [Submitted(attempt + 1)])
    end = end_of(session.step(3000, [AttemptFailed(limits.ATTEMPTS_TOTAL_MAX, "lost")]))
    assert isinstance(end.error, Unavailable)


def test_later_plans_wait_longer() -> None:
    session = running()
    delays = []
    for attempt in range(1, limits.ATTEMPTS_MAX):
        (replan,) = session.step(2000, [AttemptFailed(attempt, "lost")])
        delays.append(replan.delay_us)
        session.step(2000, [Submitted(attempt + 1)])
    assert delays == sorted(delays) and delays[0] == 0 and delays[-1] > 0


def test_a_rejection_ends_a_request_that_was_never_placed() -> None:
    session = make()
    error = Overloaded("queue full", resource="queue", retry_after_ms=500)
    assert end_of(session.step(2000, [Submitted(1), Rejected(1, error)])).error is error


def test_a_rejection_of_a_later_plan_is_tried_again_when_it_says_so() -> None:
    session = running()
    session.step(2000, [tokens(0, [1]), AttemptFailed(1, "lost"), Submitted(2)])
    error = Overloaded("queue full", resource="queue", retry_after_ms=700)
    (replan,) = session.step(2100, [Rejected(2, error)])
    assert isinstance(replan, Replan) and (replan.attempt, replan.delay_us) == (3, 700_000)


def test_a_rejection_that_no_retry_can_cure_ends_a_later_plan_too() -> None:
    session = running()
    session.step(2000, [AttemptFailed(1, "lost"), Submitted(2)])
    assert end_of(session.step(2100, [Rejected(2, InvalidField("prompt", "no"))])).reason == "error"


def test_a_cancel_ends_with_its_error_and_drops_what_comes_later() -> None:
    session = running()
    end = end_of(session.step(2000, [Stopped(Cancelled("by the client"))]))
    assert end.reason == "cancelled"
    assert session.step(2100, [tokens(0, [1]), AttemptFailed(1, "lost"), Stopped(Cancelled("again"))]) == []


def test_the_deadline_ends_it_on_time() -> None:
    session = running(deadline_us=5000)
    assert session.next_wakeup() == 5000
    assert session.step(4999, []) == []
    assert isinstance(end_of(session.step(5000, [])).error, DeadlineExceeded)


def test_an_instances_error_is_internal_and_ends_only_this_request() -> None:
    decisions = running().step(2000, [tokens(0, [1], finish="error", error="logits are NaN")])
    assert ids_of(decisions) == [1]
    error = end_of(decisions).error
    assert isinstance(error, InternalError) and "NaN" in str(error)


def test_an_instance_that_gives_up_fails_only_the_attempt() -> None:
    (replan,) = running().step(2000, [tokens(0, [], finish="cancelled", error="draining")])
    assert isinstance(replan, Replan) and "draining" in replan.reason


def test_log_probabilities_travel_with_their_tokens() -> None:
    session = running(logprobs=1)
    entries = [TokenLogprobs(-0.5, [(7, -1.0)]), TokenLogprobs(-0.25, [])]
    (emit,) = session.step(2000, [tokens(0, [1, 2], logprobs=entries)])
    assert emit.logprobs == entries


def test_log_probabilities_that_are_missing_are_an_error_and_not_made_up() -> None:
    decisions = running(logprobs=0).step(2000, [tokens(0, [1])])
    assert isinstance(end_of(decisions).error, InternalError)


def test_the_summary_says_when_who_and_how_much() -> None:
    session = running()
    session.step(3000, [tokens(0, [1], from_prefill=True, instance="p0", tokens_cached=8, queue_us=50, compute_us=400)])
    session.step(3500, [HandoffComplete(1)])
    session.step(4000, [tokens(1, [2, EOS], finish="stop")])
    summary = session.summary()
    assert (summary.tokens_prompt, summary.tokens_generated, summary.tokens_cached) == (10, 3, 8)
    assert (summary.prefill_instance, summary.decode_instance, summary.attempts) == ("p0", "d0", 1)
    assert (summary.routed_us, summary.prefill_started_us, summary.first_token_us) == (100, 1600, 2000)
    assert (summary.handoff_complete_us, summary.finished_us, summary.queue_us) == (2500, 3000, 50)


def test_cached_tokens_of_a_later_attempt_are_not_the_users_hit() -> None:
    session = running()
    session.step(2000, [tokens(0, [1], tokens_cached=2), AttemptFailed(1, "lost"), Submitted(2)])
    session.step(2100, [tokens(1, [2], attempt=2, tokens_cached=10)])
    assert session.summary().tokens_cached == 2


def test_nothing_is_wanted_after_the_end() -> None:
    session = running(deadline_us=9000)
    session.step(2000, [tokens(0, [EOS], finish="stop")])
    assert session.next_wakeup() is None and session.state is State.ENDED


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_the_same_tokens_in_other_portions_give_the_same_text(chunk: int) -> None:
    ids = CODEC.encode_now("the 漢字 and 👩‍👧 hello END world")
    session = running(stops=["END"], max_tokens=100)
    shown = ""
    for start in range(0, len(ids), chunk):
        shown += text_of(session.step(2000 + start, [tokens(start, ids[start : start + chunk])]))
    assert shown == "the 漢字 and 👩‍👧 hello "


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int, int]]]:
    """A sequence of (kind, where, how many): portions in any order, replays, stale ones, failed attempts."""
    answer = draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
    kinds = st.sampled_from(["tokens", "tokens", "tokens", "stale", "fail"])
    steps = draw(st.lists(st.tuples(kinds, st.integers(0, 19), st.integers(1, 6)), max_size=40))
    return answer, steps


@settings(max_examples=300)
@given(deliveries())
def test_every_position_is_emitted_exactly_once_whatever_arrives(
    case: tuple[list[int], list[tuple[str, int, int]]],
) -> None:
    answer, steps = case
    session = running(max_tokens=len(answer))
    emitted: list[int] = []
    ends = 0

    def take(events: list[object]) -> None:
        nonlocal ends
        for decision in session.step(2000, events):
            match decision:
                case Emit():
                    emitted.extend(decision.token_ids)
                case Replan():
                    session.step(2000, [Submitted(decision.attempt)])
                case End():
                    ends += 1
        session.check()

    for kind, where, count in steps:
        ids = answer[where : where + count]
        if kind == "tokens":
            take([tokens(where, ids, attempt=session.attempt)])
        elif kind == "stale":
            take([tokens(where, [300] * count, attempt=session.attempt - 1)])
        elif session.attempt < limits.ATTEMPTS_MAX:
            take([AttemptFailed(session.attempt, "lost")])
        assert emitted == answer[: len(emitted)]
    take([tokens(0, answer, attempt=session.attempt)])
    assert emitted == answer
    assert ends == 1
