"""Prompts that are scored, over a hand-off: P computes every position, whatever it or D has cached."""

from __future__ import annotations

import pytest
from handoff_pair_rig import Pair
from msgspec.structs import replace

from segue.ids import AttemptRef
from segue.plan import PromptScores
from segue.worker_messages import OutcomeKind, TokenDelta
from worker_runtime import events as ev
from worker_runtime.toy_engine import toy_scores, toy_tokens

PROMPT = list(range(50, 73))


class ScoringPair(Pair):
    """Keeps what was said of prompt tokens, by attempt and position."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.scores: dict[AttemptRef, list[PromptScores]] = {}
        self.from_prefill: set[bool] = set()

    def _carry_out(self, side: object, decision: ev.Decision) -> None:
        if isinstance(decision, ev.PushTokens):
            for delta in decision.deltas:
                self._keep(delta)
        super()._carry_out(side, decision)  # type: ignore[arg-type]

    def _keep(self, delta: TokenDelta) -> None:
        if delta.scores is not None:
            self.scores.setdefault(AttemptRef(delta.request_id, delta.attempt), []).append(delta.scores)
            self.from_prefill.add(delta.from_prefill)

    def scoring(self, name: str, *, max_tokens: int = 4) -> AttemptRef:
        assign = self.assign(name, PROMPT, max_tokens=max_tokens)
        return self.submit(replace(assign, sampling=replace(assign.sampling, prompt_logprobs=2)))

    def logprobs(self, key: AttemptRef) -> list[float]:
        pieces = self.scores[key]
        assert [piece.position for piece in pieces] == [1 + 8 * index for index in range(len(pieces))]
        return [value for piece in pieces for value in piece.logprobs]


def test_prefill_scores_a_prompt_that_both_sides_have_cached() -> None:
    pair = ScoringPair()
    pair.submit(pair.assign("first", PROMPT))
    pair.settle()
    pair.messages_sent.clear()
    key = pair.scoring("second")
    pair.settle()
    assert pair.logprobs(key) == toy_scores(PROMPT, 2).logprobs
    assert pair.from_prefill == {True}
    assert "Empty" not in pair.messages_sent
    assert pair.generated(key) == toy_tokens(PROMPT, 4, seed=7)


def test_only_pages_that_d_lacks_are_sent() -> None:
    pair = ScoringPair()
    pair.submit(pair.assign("first", PROMPT))
    pair.settle()
    pair.scoring("second")
    moved = 0
    while pair.p.core.live() or pair.d.core.live():
        moved += sum(len(move.pages) for move in pair.p.moves)
        if not (pair.deliver() or pair.finish_move() or pair.finish_plan(pair.p) or pair.finish_plan(pair.d)):
            break
    assert moved == 1


@pytest.mark.parametrize("fail_after", [0, 1])
def test_d_recomputes_a_page_that_failed_without_scoring_again(fail_after: int) -> None:
    pair = ScoringPair()
    key = pair.scoring("a")
    while not pair.p.moves:
        assert pair.deliver() or pair.finish_plan(pair.p)
    pair.finish_move(fail_after=fail_after)
    pair.settle()
    assert pair.logprobs(key) == toy_scores(PROMPT, 2).logprobs
    assert pair.generated(key) == toy_tokens(PROMPT, 4, seed=7)


def test_a_prompt_of_one_block_is_scored_by_d_itself() -> None:
    pair = ScoringPair()
    assign = pair.assign("a", PROMPT[:4])
    key = pair.submit(replace(assign, sampling=replace(assign.sampling, prompt_logprobs=0)))
    pair.settle()
    assert pair.logprobs(key) == toy_scores(PROMPT[:4], 0).logprobs
    assert OutcomeKind.EMPTY in pair.outcomes[key]


def test_finished_by_its_first_token_it_is_scored_all_the_same() -> None:
    pair = ScoringPair()
    key = pair.scoring("a", max_tokens=1)
    pair.settle()
    assert pair.logprobs(key) == toy_scores(PROMPT, 2).logprobs
    assert OutcomeKind.DONE_AT_P in pair.outcomes[key]
