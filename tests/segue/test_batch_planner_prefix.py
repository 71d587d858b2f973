"""Prefix cache and paging: one test for each fault that systems of this kind had."""

from __future__ import annotations

import pytest
from paged_fake_engine import prefix_digests
from planner_harness import ROOT, Output, PlannerHarness

from segue.errors import InternalError
from segue.plan import Chunk
from segue.sampling_params import SamplingParams

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]


def warmed(**options: object) -> PlannerHarness:
    """A harness that has computed PROMPT (two blocks of four) once and keeps it in its cache."""
    harness = PlannerHarness(**options)  # type: ignore[arg-type]
    harness.add(0, PROMPT, max_tokens=2)
    harness.run()
    harness.plans.clear()
    return harness


def test_fully_cached_prompt_recomputes_its_last_token_only() -> None:
    harness = warmed()
    before = harness.engine.positions_computed
    harness.add(1, PROMPT, max_tokens=1)
    harness.run()
    assert harness.engine.positions_computed == before + 1
    assert harness.outputs[1].tokens_cached == len(PROMPT) - 1
    harness.check_outputs()


def test_fully_cached_prompt_writes_to_a_copy_of_the_last_block() -> None:
    harness = warmed()
    shared = harness.pool.match(harness.hashes(PROMPT))
    harness.add(1, PROMPT)
    plan = harness.launch()
    assert plan is not None
    ((source, target),) = plan.copies
    assert source == shared[1]
    assert plan.starts[0].pages == [shared[0], target]


def test_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    harness = warmed()
    harness.add(1, PROMPT)
    harness.launch()
    assert harness.pool.counts().held == 1
    harness.collect()
    assert harness.pool.counts().held == 0


def test_fully_cached_prompt_without_room_for_a_copy_recomputes_the_last_block() -> None:
    harness = warmed(pages=3)
    assert harness.planner.reserve(9, 1, []) is not None
    harness.add(1, PROMPT, max_tokens=1)
    plan = harness.launch()
    assert plan is not None
    assert (plan.copies, plan.starts[0].tokens_ready) == ([], 4)
    harness.collect()
    harness.check_outputs()


def test_landed_prompt_without_room_for_a_copy_writes_its_own_last_block_in_place() -> None:
    harness = PlannerHarness(pages=3)
    reservation = harness.planner.reserve(0, len(PROMPT), [])
    assert reservation is not None
    assert harness.planner.reserve(9, 1, []) is not None
    harness.engine.write_remote(reservation.pages_new, PROMPT, range(len(PROMPT)))
    params = SamplingParams(max_tokens=1)
    harness.outputs[0] = Output(PROMPT, params)
    harness.planner.land(0, PROMPT, len(PROMPT), params, ROOT, reservation, len(PROMPT), order=0)
    plan = harness.launch()
    assert plan is not None
    assert plan.copies == []
    assert plan.starts[0].pages == reservation.pages_new
    harness.collect()
    harness.check_outputs()


def test_cached_prefix_is_shared_not_copied() -> None:
    harness = warmed()
    harness.add(1, [*PROMPT, 1, 2])
    plan = harness.launch()
    assert plan is not None
    assert plan.copies == []
    assert plan.starts[0].pages[:2] == harness.pool.match(harness.hashes(PROMPT))
    assert plan.chunks == [Chunk(plan.starts[0].row, 8, 2, True)]


def test_two_identical_prompts_in_one_step_one_computes_and_the_other_reads() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT)
    harness.add(1, PROMPT)
    first = harness.step()
    assert first is not None
    assert [start.seq for start in first.starts] == [0]
    harness.run()
    assert harness.outputs[1].tokens_cached == len(PROMPT) - 1
    harness.check_outputs()


def test_two_sequences_that_share_little_start_together_and_read_nothing_unfilled() -> None:
    harness = PlannerHarness()
    harness.add(0, [*PROMPT[:4], *range(20, 36)])
    harness.add(1, [*PROMPT[:4], *range(30, 46)])
    plan = harness.launch()
    assert plan is not None
    assert [start.tokens_ready for start in plan.starts] == [0, 0]
    assert not set(plan.starts[0].pages) & set(plan.starts[1].pages)
    harness.collect()
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_no_block_is_found_before_its_result_has_landed() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT)
    harness.launch()
    assert harness.pool.match(harness.hashes(PROMPT)) == []
    harness.collect()
    assert len(harness.pool.match(harness.hashes(PROMPT))) == 2


def test_published_block_covers_generated_tokens_once_they_are_final() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT, max_tokens=5)
    harness.run()
    known = PROMPT + harness.outputs[0].tokens
    assert len(harness.pool.match(harness.hashes(known[:12]))) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_sequence_hits_its_own_blocks_and_that_is_no_user_hit(depth: int) -> None:
    harness = PlannerHarness(pages=6, depth=depth)
    harness.add(0, [1, 2, 3], max_tokens=13, order=0)
    harness.add(1, [5, 6, 7, 8, 9], max_tokens=11, order=1)
    harness.run()
    assert harness.planner.counts().preemptions > 0
    restarts = [start for plan in harness.plans for start in plan.starts if start.seq == 1][1:]
    assert any(start.tokens_ready > 0 for start in restarts)
    assert harness.outputs[1].tokens_cached == 0
    harness.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_keeps_every_sampled_token(depth: int) -> None:
    harness = PlannerHarness(pages=6, depth=depth)
    harness.add(0, [1, 2, 3], max_tokens=13, order=0)
    harness.add(1, [5, 6, 7, 8, 9], max_tokens=11, order=1)
    harness.run()
    for plan in harness.plans:
        for start in plan.starts:
            output = harness.outputs[start.seq]
            known = output.prompt + output.tokens
            assert start.tokens == known[: len(start.tokens)]
    restarts = [len(start.tokens) for plan in harness.plans for start in plan.starts if start.seq == 1]
    assert restarts == sorted(set(restarts))
    assert len(restarts) > 1
    harness.check_outputs()


@pytest.mark.parametrize("pages", [5, 6, 9, 32])
def test_cache_on_and_off_give_the_same_tokens_under_eviction(pages: int) -> None:
    outputs = []
    for caching in (True, False):
        harness = PlannerHarness(pages=pages, caching=caching, seqs=3, budget=7)
        for seq in range(9):
            harness.add(seq, [*PROMPT[: 2 + seq % 7], seq % 2], max_tokens=8, order=seq)
        harness.run()
        harness.check_outputs()
        outputs.append([output.tokens for output in harness.outputs.values()])
    assert outputs[0] == outputs[1]


def test_other_root_shares_nothing() -> None:
    harness = warmed()
    harness.planner.add(1, PROMPT, len(PROMPT), SamplingParams(max_tokens=1), b"another tenant", order=0)
    plan = harness.launch()
    assert plan is not None
    assert plan.starts[0].tokens_ready == 0


def test_hit_counts_prompt_tokens_only() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT, max_tokens=6)
    harness.run()
    tokens = PROMPT + harness.outputs[0].tokens
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    harness.planner.add(1, tokens, len(PROMPT) - 1, params, ROOT, order=0)
    harness.launch()
    (update,) = harness.planner.finished(harness.engine.collect())
    assert update.tokens_cached == len(PROMPT) - 1


def test_failed_row_ends_only_its_sequence_and_leaves_nothing_in_the_cache() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT)
    harness.add(1, [1, 2, 3])
    harness.engine.errors[0] = "logits are not finite"
    harness.run()
    assert (harness.outputs[0].finish, harness.outputs[0].error) == ("error", "logits are not finite")
    assert harness.outputs[0].tokens == []
    assert harness.pool.match(harness.hashes(PROMPT)) == []
    harness.check_output(1)
    harness.check_idle()


def test_reservation_reuses_the_cached_prefix_but_never_the_last_block() -> None:
    harness = warmed()
    cached = harness.pool.match(harness.hashes(PROMPT))
    reservation = harness.planner.reserve(1, len(PROMPT), harness.hashes(PROMPT))
    assert reservation is not None
    assert reservation.pages_cached == cached[:1]
    assert len(reservation.pages_new) == 1


def test_reserved_pages_are_held_and_found_by_nobody() -> None:
    harness = PlannerHarness(pages=3)
    reservation = harness.planner.reserve(1, 8, harness.hashes(PROMPT))
    assert reservation is not None
    assert harness.pool.counts().held == 2
    assert harness.pool.match(harness.hashes(PROMPT)) == []
    harness.planner.check()


def test_reservation_without_room_is_refused_and_takes_nothing() -> None:
    harness = PlannerHarness(pages=2)
    assert harness.planner.reserve(1, 5, []) is not None
    assert harness.planner.reserve(2, 4, []) is None
    assert harness.pool.counts().held == 2


def test_landed_sequence_decodes_next_and_its_blocks_are_found() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT, max_tokens=4)
    harness.planner.cancel(0)
    first = harness.expected(0)[0][0]
    reservation = harness.planner.reserve(0, len(PROMPT), harness.hashes(PROMPT))
    assert reservation is not None
    harness.engine.write_remote(reservation.pages_new, PROMPT, range(len(PROMPT)))
    harness.outputs[0].tokens.append(first)
    params = harness.outputs[0].sampling
    harness.planner.land(0, [*PROMPT, first], len(PROMPT), params, ROOT, reservation, len(PROMPT), order=0)
    assert len(harness.pool.match(harness.hashes(PROMPT))) == 2
    plan = harness.launch()
    assert plan is not None
    assert (plan.chunks, len(plan.decodes)) == ([], 1)
    harness.collect()
    harness.run()
    harness.check_outputs()


def test_positions_that_did_not_land_are_recomputed() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT, max_tokens=4)
    harness.planner.cancel(0)
    reservation = harness.planner.reserve(0, len(PROMPT), harness.hashes(PROMPT))
    assert reservation is not None
    harness.engine.write_remote(reservation.pages_new, PROMPT, range(5))
    params = harness.outputs[0].sampling
    harness.planner.land(0, PROMPT, len(PROMPT), params, ROOT, reservation, 5, order=0)
    assert len(harness.pool.match(harness.hashes(PROMPT))) == 1
    plan = harness.launch()
    assert plan is not None
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(5, 3)]
    harness.collect()
    harness.run()
    harness.check_outputs()


def test_aborted_reservation_is_quarantined_until_fenced() -> None:
    harness = PlannerHarness(pages=4)
    reservation = harness.planner.reserve(1, 8, [])
    assert reservation is not None
    harness.planner.reservation_abort(reservation, quarantine=True)
    assert harness.pool.counts().quarantined == 2
    harness.pool.unquarantine(reservation.pages_new)
    assert harness.pool.counts().free == 4


def test_reservation_ends_once() -> None:
    harness = PlannerHarness()
    reservation = harness.planner.reserve(1, 8, [])
    assert reservation is not None
    harness.planner.reservation_abort(reservation, quarantine=False)
    with pytest.raises(InternalError, match="not open"):
        harness.planner.reservation_abort(reservation, quarantine=False)


def test_prefill_only_sequence_keeps_its_pages_until_released() -> None:
    harness = PlannerHarness()
    harness.add(0, PROMPT, prefill_only=True, max_tokens=9)
    harness.run()
    assert len(harness.outputs[0].tokens) == 1
    assert harness.outputs[0].finish == ""
    pages = harness.planner.pages(0)
    slots = [harness.engine.slots[pages[position // 4], position % 4] for position in range(len(PROMPT))]
    assert slots == prefix_digests(PROMPT)
    assert harness.pool.counts().active == 2
    harness.planner.release(0)
    harness.check_idle()


def test_prefill_only_sequence_reports_every_chunk() -> None:
    harness = PlannerHarness(budget=3)
    harness.add(0, PROMPT, prefill_only=True)
    harness.run()
    assert harness.outputs[0].tokens_computed == [3, 6, 8]


def test_parked_sequence_computes_no_more_and_keeps_its_pages() -> None:
    harness = PlannerHarness(budget=3, depth=1)
    harness.add(0, PROMPT, prefill_only=True)
    harness.launch()
    assert harness.planner.park(0)
    assert harness.launch() is None
    harness.collect()
    assert len(harness.planner.pages(0)) == 2
    assert not harness.planner.has_work()
    harness.planner.release(0)
    harness.check_idle()
