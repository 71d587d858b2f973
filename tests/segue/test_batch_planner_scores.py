"""Prompts that are scored: every position is computed by the sequence itself, whatever the cache holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from planner_harness import PlannerHarness

from segue.batch_planner import BatchPlanner
from segue.block_pool import BlockPool
from segue.planner_records import PlannerLimits
from segue.sampling_params import SamplingParams
from worker_runtime.toy_engine import ToyEngine, toy_scores, toy_tokens

PROMPT = list(range(3, 24))


class ScoringRig:
    """A planner on the toy engine, whose scores are right only if every page before a token was."""

    def __init__(self, *, pages: int = 64, budget: int = 64, depth: int = 0) -> None:
        self.pool = BlockPool(pages, 4, True)
        self.planner = BatchPlanner(self.pool, PlannerLimits(8, budget, 64, depth), ())
        self.engine = ToyEngine(pages, 4)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, dict[int, float]] = {}
        self.cached: dict[int, int] = {}

    def add(self, seq: int, prompt: list[int], tokens: list[int] = (), **sampling: int) -> None:  # type: ignore[assignment]
        params = SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
        self.planner.add(seq, [*prompt, *tokens], len(prompt), params, self.engine.kv_root, order=seq)
        self.tokens[seq], self.logprobs[seq] = [], {}

    def plans(self) -> Iterator[object]:
        while self.planner.has_work():
            while (plan := self.planner.plan()) is not None:
                self.engine.launch(plan)
                yield plan
            self.land()

    def land(self) -> None:
        for update in self.planner.finished(self.engine.collect()):
            self.tokens[update.seq] += update.tokens
            self.cached[update.seq] = update.tokens_cached
            if update.scores is not None:
                self.logprobs[update.seq].update(enumerate(update.scores.logprobs, update.scores.position))
        self.planner.check()

    def run(self) -> None:
        for _ in self.plans():
            pass


def expected(prompt: list[int]) -> dict[int, float]:
    return dict(enumerate(toy_scores(prompt, 0).logprobs, 1))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [5, 8, 64])
def test_a_cached_prompt_is_scored_at_every_position(budget: int, depth: int) -> None:
    rig = ScoringRig(budget=budget, depth=depth)
    rig.add(1, PROMPT)
    rig.run()
    rig.add(2, PROMPT, prompt_logprobs=2)
    rig.run()
    assert rig.logprobs[2] == expected(PROMPT)
    assert (rig.cached[2], rig.logprobs[1]) == (0, {})
    assert rig.tokens[1] == rig.tokens[2] == toy_tokens(PROMPT, 4)


def test_what_a_scored_prompt_computed_serves_others() -> None:
    rig = ScoringRig()
    rig.add(1, PROMPT, prompt_logprobs=0)
    rig.run()
    rig.add(2, PROMPT)
    rig.run()
    assert rig.cached[2] == 20


def test_siblings_do_not_wait_for_each_other_to_be_scored() -> None:
    rig = ScoringRig(budget=8)
    for seq in (1, 2, 3):
        rig.add(seq, PROMPT, prompt_logprobs=1)
    rig.run()
    assert all(rig.logprobs[seq] == expected(PROMPT) for seq in (1, 2, 3))


def test_generated_tokens_of_an_earlier_attempt_are_not_scored() -> None:
    rig = ScoringRig()
    known = toy_tokens(PROMPT, 2)
    rig.add(1, PROMPT, known, prompt_logprobs=0)
    rig.run()
    assert rig.logprobs[1] == expected(PROMPT)
    assert known + rig.tokens[1] == toy_tokens(PROMPT, 4)


def test_a_single_token_has_nothing_before_it_to_be_scored_by() -> None:
    rig = ScoringRig()
    rig.add(1, [7], prompt_logprobs=3)
    plan = next(iter(rig.plans()))
    assert plan.starts[0].sampling.prompt_logprobs is None  # type: ignore[attr-defined]
    assert rig.logprobs[1] == {}


@pytest.mark.parametrize(("budget", "starts_scored"), [(3, 2), (8, 1)])
def test_preempted_it_is_scored_from_the_start_again_unless_it_was_done(budget: int, starts_scored: int) -> None:
    """The older sequence takes the pages of the younger one: in the middle of its prompt, or behind it."""
    rig = ScoringRig(pages=13, budget=budget)
    rig.add(1, PROMPT, max_tokens=24)
    rig.add(2, list(range(40, 61)), prompt_logprobs=1, max_tokens=12)
    starts = [start for plan in rig.plans() for start in plan.starts if start.seq == 2]  # type: ignore[attr-defined]
    scoring = [start for start in starts if start.sampling.prompt_logprobs is not None]
    assert (len(starts), len(scoring)) == (2, starts_scored)
    assert all(start.tokens_ready == 0 for start in scoring)
    assert rig.logprobs[2] == expected(list(range(40, 61)))
    assert rig.tokens[2] == toy_tokens(list(range(40, 61)), 12)


def test_the_fake_engine_agrees_that_only_scored_prompts_leave_the_cache_alone() -> None:
    harness = PlannerHarness()
    harness.add(1, PROMPT)
    while harness.planner.has_work():
        harness.launch()
        harness.collect()
    computed = harness.engine.positions_computed
    harness.add(2, PROMPT, prompt_logprobs=0, max_tokens=1)
    while harness.planner.has_work():
        harness.launch()
        harness.collect()
    assert harness.engine.positions_computed - computed == len(PROMPT)
