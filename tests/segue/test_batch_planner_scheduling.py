"""Bounds and scheduling: one test for each fault that systems of this kind had."""

from __future__ import annotations

import msgspec
import pytest
from paged_fake_engine import reference_tokens
from planner_harness import EOS, ROOT, Output, PlannerHarness

from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.errors import InternalError, InvalidField
from segue.plan import Chunk, PlanResult
from segue.sampling_params import SamplingParams

# -- bounds


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 14, 15])
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_lengths_around_every_block_multiple(length: int, caching: bool) -> None:
    harness = PlannerHarness(model_len=16, caching=caching)
    for seq in range(2):
        harness.add(seq, list(range(length)), max_tokens=20)
        harness.run()
    harness.check_outputs()
    assert len(harness.outputs[0].tokens) == 16 - length
    harness.check_idle()


def test_prompt_of_the_models_maximum_is_refused_and_named() -> None:
    harness = PlannerHarness(model_len=16)
    with pytest.raises(InvalidField, match="prompt: 16 tokens, this instance takes at most 15"):
        harness.add(0, list(range(16)))


def test_prompt_one_below_the_models_maximum_generates_one_token() -> None:
    harness = PlannerHarness(model_len=16)
    harness.add(0, list(range(15)))
    harness.run()
    assert (len(harness.outputs[0].tokens), harness.outputs[0].finish) == (1, "length")


def test_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    harness = PlannerHarness(pages=2, model_len=1000)
    with pytest.raises(InvalidField, match="prompt: 8 tokens, this instance takes at most 7"):
        harness.add(0, list(range(8)))
    with pytest.raises(InvalidField, match="prompt"):
        harness.planner.reserve(0, 8, [])


def test_sequence_ends_where_the_pool_ends() -> None:
    harness = PlannerHarness(pages=2, model_len=1000)
    harness.add(0, [1, 2, 3], max_tokens=500)
    harness.run()
    assert (len(harness.outputs[0].tokens), harness.outputs[0].finish) == (5, "length")


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidField, match="prompt"):
        PlannerHarness().add(0, [])


def test_nothing_left_to_generate_is_refused() -> None:
    harness = PlannerHarness()
    with pytest.raises(InvalidField, match="max_tokens"):
        harness.planner.add(0, [1, 2, 3], 1, SamplingParams(max_tokens=2), ROOT, order=0)


def test_known_sequence_cannot_be_added_again() -> None:
    harness = PlannerHarness()
    harness.add(0, [1])
    with pytest.raises(InternalError, match="known already"):
        harness.add(0, [1])


@pytest.mark.parametrize("depth", [0, 1])
def test_one_more_request_than_rows(depth: int) -> None:
    harness = PlannerHarness(seqs=3, depth=depth)
    for seq in range(4):
        harness.add(seq, [seq, 1, 2], order=seq)
    harness.step()
    assert harness.planner.counts().waiting == 1
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_token_budget_of_one_makes_progress(depth: int) -> None:
    harness = PlannerHarness(budget=1, depth=depth)
    for seq in range(3):
        harness.add(seq, [seq, 1, 2, 3, 4], order=seq)
    harness.run()
    assert all(len(plan.decodes) + sum(chunk.length for chunk in plan.chunks) == 1 for plan in harness.plans)
    harness.check_outputs()


# -- stopping


def test_eos_ends_a_sequence_unless_ignored() -> None:
    prompt = next([seed] for seed in range(1000) if EOS in reference_tokens([seed], 6)[1:])
    ends = reference_tokens(prompt, 6).index(EOS)
    harness = PlannerHarness()
    harness.add(0, prompt, max_tokens=6, ignore_eos=False)
    harness.add(1, prompt, max_tokens=6)
    harness.run()
    assert (harness.outputs[0].finish, len(harness.outputs[0].tokens)) == ("stop", ends + 1)
    assert (harness.outputs[1].finish, len(harness.outputs[1].tokens)) == ("length", 6)


def test_stop_token_ends_a_sequence_and_is_its_last_token() -> None:
    tokens = reference_tokens([1, 2], 8)
    harness = PlannerHarness()
    harness.add(0, [1, 2], max_tokens=8, stop_token_ids=(tokens[2],))
    harness.run()
    assert (harness.outputs[0].tokens, harness.outputs[0].finish) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


def test_no_stop_before_min_tokens() -> None:
    tokens = reference_tokens([1, 2], 8)
    harness = PlannerHarness()
    harness.add(0, [1, 2], max_tokens=8, min_tokens=5, stop_token_ids=tuple(tokens[:4]))
    harness.run()
    assert len(harness.outputs[0].tokens) >= 5


def test_max_tokens_counts_tokens_of_earlier_attempts() -> None:
    harness = PlannerHarness()
    harness.planner.add(0, [1, 2, 3, 4], 2, SamplingParams(max_tokens=3, ignore_eos=True), ROOT, order=0)
    harness.launch()
    (update,) = harness.planner.finished(harness.engine.collect())
    assert (len(update.tokens), update.finish) == (1, "length")


def test_tokens_past_a_stop_inside_a_run_of_steps_are_dropped() -> None:
    tokens = reference_tokens([1], 12)
    stop = next(token for index, token in enumerate(tokens) if index % 4 == 1 and tokens.index(token) == index)
    harness = PlannerHarness(steps=4)
    harness.add(0, [1], max_tokens=12, stop_token_ids=(stop,))
    harness.run()
    assert harness.outputs[0].tokens == tokens[: tokens.index(stop) + 1]
    harness.check_idle()


# -- scheduling


def test_decodes_come_before_chunks_in_one_budget() -> None:
    harness = PlannerHarness(budget=6, block_size=16)
    for seq in range(2):
        harness.add(seq, [seq], order=seq)
    harness.step()
    harness.add(2, list(range(10)), order=2)
    plan = harness.step()
    assert plan is not None
    assert len(plan.decodes) == 2
    assert [(chunk.start, chunk.length, chunk.sample) for chunk in plan.chunks] == [(0, 4, False)]


def test_long_prompt_is_prefilled_in_chunks() -> None:
    harness = PlannerHarness(budget=4)
    harness.add(0, list(range(10)), max_tokens=1)
    harness.run()
    assert [plan.chunks for plan in harness.plans] == [
        [Chunk(0, 0, 4, False)],
        [Chunk(0, 4, 4, False)],
        [Chunk(0, 8, 2, True)],
    ]
    harness.check_outputs()


def test_oldest_prefill_advances_where_decodes_fill_the_budget() -> None:
    harness = PlannerHarness(budget=2)
    for seq in (1, 2):
        harness.add(seq, [seq], max_tokens=50, order=seq)
    harness.step()
    harness.planner.cancel(2)
    harness.add(0, [5, 6, 7], order=0)
    harness.step()
    harness.add(3, [3], max_tokens=50, order=3)
    harness.step()
    harness.step()
    assert len(harness.outputs[0].tokens) > 0


def test_sequences_are_admitted_in_order() -> None:
    harness = PlannerHarness(seqs=1)
    for seq, order in ((0, 5), (1, 3), (2, 4)):
        harness.add(seq, [seq, 1, 2], order=order)
    harness.run()
    assert [start.seq for plan in harness.plans for start in plan.starts] == [1, 2, 0]


def test_head_of_the_queue_is_not_overtaken_for_want_of_pages() -> None:
    harness = PlannerHarness(pages=5, seqs=4)
    harness.add(0, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=4, order=0)
    harness.step()
    harness.add(1, list(range(20, 36)), max_tokens=2, order=1)
    harness.add(2, [9], max_tokens=2, order=2)
    harness.run()
    assert [start.seq for plan in harness.plans for start in plan.starts] == [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_two_that_want_the_whole_pool_do_not_evict_each_other_forever(depth: int, steps: int) -> None:
    harness = PlannerHarness(pages=6, depth=depth, steps=steps)
    for seq in range(2):
        harness.add(seq, [seq, 2, 3, 4], max_tokens=19, order=seq)
    harness.run(200)
    counts = harness.planner.counts()
    assert 0 < counts.preemptions <= 3
    assert [start.seq for plan in harness.plans for start in plan.starts].count(0) == 1
    harness.check_outputs()


def test_oldest_sequence_stalls_for_held_pages_and_is_not_preempted() -> None:
    harness = PlannerHarness(pages=3)
    harness.add(0, [1, 2, 3], max_tokens=6)
    harness.step()
    held = harness.pool.allocate(2)
    harness.pool.hold(held)
    harness.step()
    assert harness.launch() is None
    assert len(harness.planner.pages(0)) == 1
    harness.pool.unhold(held)
    harness.pool.release(held)
    harness.run()
    assert harness.planner.counts().preemptions == 0
    harness.check_outputs()


def test_younger_sequence_stalls_rather_than_preempt_itself_or_an_older_one() -> None:
    harness = PlannerHarness(pages=4)
    harness.add(0, [1, 2], max_tokens=9, order=0)
    harness.add(1, [3, 4, 5], max_tokens=9, order=1)
    harness.step()
    held = harness.pool.allocate(2)
    harness.pool.hold(held)
    harness.step()
    plan = harness.step()
    assert plan is not None
    assert len(plan.decodes) == 1
    assert harness.planner.counts().preemptions == 0
    assert len(harness.planner.pages(1)) == 1


def test_stalled_sequence_gives_its_row_to_an_older_one_when_nothing_else_can_run() -> None:
    harness = PlannerHarness(pages=4, seqs=1)
    harness.add(5, [1, 2, 3], max_tokens=6, order=5)
    harness.step()
    prompt = [7, 8, 9, 10, 11]
    first = reference_tokens(prompt, 1)
    reservation = harness.planner.reserve(1, len(prompt), [])
    assert reservation is not None
    harness.engine.write_remote(reservation.pages_new, prompt, range(len(prompt)))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    harness.outputs[1] = Output(prompt, params, list(first))
    harness.planner.land(1, prompt + first, len(prompt), params, ROOT, reservation, len(prompt), order=1)
    held = harness.pool.allocate(1)
    harness.pool.hold(held)
    harness.step()
    harness.run()
    assert harness.planner.counts().preemptions == 1
    assert [start.seq for plan in harness.plans for start in plan.starts] == [5, 1, 5]
    harness.check_outputs()


def test_nothing_is_planned_for_a_row_that_is_about_to_reach_its_length() -> None:
    harness = PlannerHarness(depth=1)
    harness.add(0, [1, 2, 3], max_tokens=1)
    assert harness.launch() is not None
    assert harness.launch() is None


def test_page_of_a_cancelled_sequence_is_not_reused_while_its_plan_is_in_flight() -> None:
    harness = PlannerHarness(pages=2, depth=1)
    harness.add(0, [1, 2, 3], max_tokens=3)
    harness.launch()
    harness.planner.cancel(0)
    assert harness.pool.counts().held == 1
    assert harness.planner.reserve(1, 5, []) is None
    harness.collect()
    assert harness.planner.reserve(1, 5, []) is not None


def test_row_is_not_reused_while_a_plan_in_flight_names_it() -> None:
    harness = PlannerHarness(seqs=1, depth=1)
    harness.add(0, [1, 2, 3])
    harness.launch()
    harness.planner.cancel(0)
    harness.add(1, [4, 5, 6])
    assert harness.launch() is None
    harness.collect()
    plan = harness.launch()
    assert plan is not None
    assert (plan.ends, [start.row for start in plan.starts]) == ([0], [0])
    harness.run()
    harness.check_output(1)


def test_decode_of_a_row_that_turns_out_finished_is_dropped() -> None:
    tokens = reference_tokens([1, 2], 3)
    harness = PlannerHarness(depth=1)
    harness.add(0, [1, 2], max_tokens=9, stop_token_ids=(tokens[0],))
    harness.launch()
    second = harness.launch()
    assert second is not None
    assert second.decodes == [0]
    harness.run()
    assert (harness.outputs[0].tokens, harness.outputs[0].finish) == (tokens[:1], "stop")
    harness.check_idle()


def test_finish_and_cancel_in_the_same_step_end_once() -> None:
    harness = PlannerHarness()
    harness.add(0, [1, 2], max_tokens=1)
    harness.launch()
    assert harness.planner.cancel(0)
    assert harness.collect() == []
    assert not harness.planner.cancel(0)
    harness.check_idle()


def test_cancel_after_the_finish_is_answered_no() -> None:
    harness = PlannerHarness()
    harness.add(0, [1, 2], max_tokens=1)
    harness.run()
    assert not harness.planner.cancel(0)
    harness.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_plans_than_the_pipeline_takes(depth: int) -> None:
    harness = PlannerHarness(depth=depth)
    harness.add(0, [1, 2], max_tokens=8)
    launched = 0
    while harness.launch() is not None:
        launched += 1
    assert launched == depth + 1


def test_results_are_taken_in_launch_order() -> None:
    harness = PlannerHarness(depth=1)
    harness.add(0, [1, 2], max_tokens=8)
    harness.launch()
    harness.launch()
    with pytest.raises(InternalError, match="oldest in flight"):
        harness.planner.finished(PlanResult(op=2, steps=1, rows=[], elapsed_us=0))


def test_missing_row_in_a_result_is_noticed() -> None:
    harness = PlannerHarness()
    harness.add(0, [1, 2], max_tokens=8)
    harness.launch()
    with pytest.raises(InternalError, match="sequence 0"):
        harness.planner.finished(PlanResult(op=1, steps=1, rows=[], elapsed_us=0))


def test_decode_only_plans_may_run_several_steps_with_all_pages_in_the_table() -> None:
    harness = PlannerHarness(steps=4)
    harness.add(0, [1, 2, 3, 4], max_tokens=9)
    harness.step()
    plan = harness.step()
    assert plan is not None
    assert plan.steps_max == 4
    assert len(harness.planner.pages(0)) == 2
    harness.run()
    harness.check_outputs()


def test_more_steps_never_preempt() -> None:
    harness = PlannerHarness(pages=3, steps=8)
    harness.add(0, [1], max_tokens=4, order=0)
    harness.add(1, [2], max_tokens=4, order=1)
    harness.run()
    assert harness.planner.counts().preemptions == 0
    harness.check_outputs()


def test_truncated_run_of_steps_goes_on_where_it_stopped() -> None:
    harness = PlannerHarness(steps=4, depth=1)
    harness.add(0, [1, 2, 3], max_tokens=20)
    while harness.planner.has_work():
        harness.launch()
        harness.launch()
        harness.collect(steps=3)
    harness.check_outputs()
    harness.check_idle()


def test_no_step_runs_past_the_longest_sequence() -> None:
    harness = PlannerHarness(steps=8, model_len=10)
    harness.add(0, [1, 2, 3], max_tokens=100)
    harness.add(1, [4, 5, 6, 7, 8], max_tokens=100)
    harness.run()
    assert max(len(row.tokens) for row in harness.engine.rows.values()) <= 10
    harness.check_outputs()


def test_reservation_waits_while_a_sequence_starves_for_pages() -> None:
    harness = PlannerHarness(pages=4, seqs=4)
    harness.add(0, [1, 2, 3, 4, 5], max_tokens=7, order=0)
    harness.step()
    harness.add(1, list(range(12)), max_tokens=2, order=1)
    harness.step()
    assert harness.planner.reserve(9, 3, []) is None
    harness.run()
    assert harness.planner.reserve(9, 3, []) is not None


def test_decode_plan_says_only_what_changed() -> None:
    harness = PlannerHarness(budget=400, block_size=64)
    for seq in range(8):
        harness.add(seq, [seq, *range(40)], max_tokens=9)
    harness.step()
    plan = harness.planner.plan()
    assert plan is not None
    assert plan.decodes == list(range(8))
    assert (plan.ends, plan.starts, plan.grows, plan.chunks) == ([], [], [], [])
    assert len(msgspec.msgpack.encode(plan)) < 100


def chunk_lengths(harness: PlannerHarness) -> list[list[int]]:
    return [[chunk.length for chunk in plan.chunks] for plan in harness.plans if plan.chunks]


def test_steps_that_others_wait_for_are_saturated_and_no_longer() -> None:
    """Prompts of 6 tokens in steps of 8; what a step decodes, the first token of seq 0 on, comes off its chunks."""
    harness = PlannerHarness(budget=40, saturating=8)
    for seq in range(4):
        harness.add(seq, [10 * seq + offset for offset in range(1, 7)], max_tokens=9, order=seq)
    harness.run()
    assert chunk_lengths(harness) == [[6, 2], [4, 3], [3, 3], [3]]
    harness.check_outputs()


def test_a_prompt_that_is_alone_uses_the_whole_budget_and_one_beside_decodes_does_not() -> None:
    harness = PlannerHarness(budget=40, saturating=8)
    harness.add(0, list(range(100, 130)), max_tokens=9)
    harness.step()
    harness.add(1, list(range(200, 216)), max_tokens=2, order=1)
    harness.run()
    assert chunk_lengths(harness) == [
        [30],
        [
            7,
        ],
        [7],
        [2],
    ]
    harness.check_outputs()


def test_however_many_decode_chunks_get_half_of_a_saturated_step() -> None:
    harness = PlannerHarness(budget=40, seqs=16, saturating=4)
    for seq in range(9):
        harness.add(seq, [seq + 1], max_tokens=20, order=seq)
    for _ in range(3):
        harness.step()
    harness.add(9, list(range(50, 56)), max_tokens=2, order=9)
    done = len(harness.plans)
    harness.run()
    assert [[chunk.length for chunk in plan.chunks] for plan in harness.plans[done : done + 3]] == [[2], [2], [2]]
    harness.check_outputs()


def test_queue_counts_return_to_zero() -> None:
    harness = PlannerHarness(budget=3)
    harness.add(0, [1, 2, 3, 4, 5])
    harness.add(1, [7, 8], order=1)
    assert harness.planner.counts().tokens_queued == 7
    harness.step()
    assert harness.planner.counts().tokens_queued == 4
    harness.planner.cancel(1)
    harness.run()
    counts = harness.planner.counts()
    assert (counts.running, counts.waiting, counts.tokens_queued, counts.tokens_running) == (0, 0, 0, 0)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="impossible limits"):
        BatchPlanner(BlockPool(1, 1), PlannerLimits(1, 0, 1), ())
