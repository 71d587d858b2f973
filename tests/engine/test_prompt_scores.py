"""Log-probabilities of prompt tokens equal those of transformers, however the prompt is cut into chunks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import family_configs, reference_logits, write_checkpoint

from engine import prompt_scores
from engine.engine import Engine, load_engine
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.plan import BatchPlan, Chunk, PromptScores, RowStart
from segue.sampling_params import SamplingParams

torch.set_num_threads(1)

PROMPT = random.Random(4).choices(range(250), k=21)
SCORING = SamplingParams(temperature=0.0, prompt_logprobs=3)
PLAIN = SamplingParams(temperature=0.0)
TOKENS_REAL = 257
"""The tokenizer's; the rows behind them are padding."""

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_checkpoint(family_configs()["llama"], directory)


@pytest.fixture
def engine(checkpoint: tuple[Path, torch.nn.Module]) -> Engine:
    config = EngineConfig(device="cpu", block_size=4, pages=64)
    return load_engine(ModelConfig(path=str(checkpoint[0])), config, SchedulerConfig(max_num_seqs=8))


def row(number: int, tokens: list[int], sampling: SamplingParams, tokens_prompt: int | None = None) -> RowStart:
    pages = list(range(number * 8, number * 8 + 8))
    return RowStart(number, 70 + number, tokens, tokens_prompt or len(tokens), 0, pages, sampling)


def scored(engine: Engine, **plan: object) -> list[tuple[int, PromptScores]]:
    engine.launch(BatchPlan(op=1, **plan))
    return [(entry.seq, entry.scores) for entry in engine.collect().scores]


def expected_logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return reference_logits(model, tokens)[:, :TOKENS_REAL].log_softmax(-1)


def check(scores: PromptScores, logprobs: torch.Tensor, tokens: list[int]) -> None:
    """`logprobs` [positions, vocab] of the whole prompt."""
    for offset, value in enumerate(scores.logprobs):
        at = scores.position + offset
        before = logprobs[at - 1]
        assert value == pytest.approx(before[tokens[at]].item(), abs=TOLERANCE)
        assert scores.ranks[offset] == 1 + int((before > before[tokens[at]]).sum())
        best = before.topk(scores.alternatives)
        own = slice(offset * scores.alternatives, (offset + 1) * scores.alternatives)
        assert scores.top_ids[own] == best.indices.tolist()
        assert scores.top_logprobs[own] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("cuts", [[21], [1, 19, 1], [7, 14], [5, 5, 5, 6]])
def test_every_prompt_token_but_the_first_is_scored_once(checkpoint, engine, cuts):
    logprobs, positions, start = expected_logprobs(checkpoint[1], PROMPT), [], 0
    for length in cuts:
        chunk = Chunk(2, start, length, start + length == len(PROMPT))
        for seq, scores in scored(engine, starts=[] if start else [row(2, PROMPT, SCORING)], chunks=[chunk]):
            assert seq == 72
            check(scores, logprobs, PROMPT)
            positions += range(scores.position, scores.position + len(scores.logprobs))
        start += length
    assert positions == list(range(1, len(PROMPT)))


def test_rows_beside_it_are_neither_scored_nor_disturbed(checkpoint, engine):
    rows = [row(0, PROMPT, PLAIN), row(1, PROMPT[:9], SCORING), row(2, PROMPT[3:], PLAIN)]
    chunks = [Chunk(0, 0, 21, True), Chunk(1, 0, 9, True), Chunk(2, 0, 18, True)]
    engine.launch(BatchPlan(op=1, starts=rows, chunks=chunks))
    result = engine.collect()
    [entry] = result.scores
    check(entry.scores, expected_logprobs(checkpoint[1], PROMPT[:9]), PROMPT[:9])
    expected = [
        expected_logprobs(checkpoint[1], tokens)[-1].argmax().item() for tokens in (PROMPT, PROMPT[:9], PROMPT[3:])
    ]
    assert [sampled.tokens for sampled in result.rows] == [[token] for token in expected]


def test_generated_tokens_of_an_earlier_attempt_are_not_the_prompt(checkpoint, engine):
    [(_, scores)] = scored(engine, starts=[row(0, PROMPT, SCORING, tokens_prompt=8)], chunks=[Chunk(0, 0, 21, True)])
    assert (scores.position, len(scores.logprobs)) == (1, 7)
    check(scores, expected_logprobs(checkpoint[1], PROMPT), PROMPT)


def test_no_alternatives_leaves_the_tokens_own_values(checkpoint, engine):
    bare = SamplingParams(temperature=0.0, prompt_logprobs=0)
    [(_, scores)] = scored(engine, starts=[row(0, PROMPT, bare)], chunks=[Chunk(0, 0, 21, True)])
    assert (len(scores.logprobs), scores.top_ids, scores.top_logprobs) == (20, [], [])
    check(scores, expected_logprobs(checkpoint[1], PROMPT), PROMPT)


def test_slices_of_a_chunk_join_without_a_seam(checkpoint, engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_scores, "LOGITS_BYTES_MAX", 3 * 4 * 260)
    [(_, scores)] = scored(engine, starts=[row(0, PROMPT, SCORING)], chunks=[Chunk(0, 0, 21, True)])
    assert len(scores.logprobs) == 20
    check(scores, expected_logprobs(checkpoint[1], PROMPT), PROMPT)
