"""Prompts that are scored leave the graphs for the eager path, on the same rows: right values, same tokens after."""

from __future__ import annotations

import random

import pytest
import torch

from engine.cuda.runner import GraphRunner
from engine.runner import Runner
from segue.plan import BatchPlan, Chunk, PromptScores, RowStart, RowTokens
from segue.sampling_params import SamplingParams
from tests.engine_cuda.driving import graph_engine, reference_engine

PROMPT = random.Random(6).choices(range(8, 200), k=13)
SCORING = SamplingParams(temperature=0.0, prompt_logprobs=3)
TOLERANCE = {"cuda": 2e-3, "cpu": 1e-3}
"""Float32 on both; a GPU's products may use TF32 inside of the kernels."""


def run(engine: Runner | GraphRunner, sampling: SamplingParams) -> tuple[list[PromptScores], list[RowTokens]]:
    """A prompt in two chunks, then a decode step, which a graph may do."""
    start = RowStart(1, 7, PROMPT, len(PROMPT), 0, [4, 2, 9], sampling)
    plans = [
        BatchPlan(op=1, starts=[start], chunks=[Chunk(1, 0, 5, False)]),
        BatchPlan(op=2, chunks=[Chunk(1, 5, 8, True)]),
        BatchPlan(op=3, decodes=[1]),
    ]
    scores, rows = [], []
    for plan in plans:
        engine.launch(plan)
        result = engine.collect()
        scores += [entry.scores for entry in result.scores]
        rows += result.rows
    return scores, rows


@pytest.mark.slow
def test_scores_and_tokens_equal_the_plain_engine(device: torch.device) -> None:
    expected, expected_rows = run(reference_engine(), SCORING)
    scores, rows = run(graph_engine(device), SCORING)
    assert [row.tokens for row in rows] == [row.tokens for row in expected_rows]
    assert [piece.position for piece in scores] == [1, 6]
    for piece, other in zip(scores, expected, strict=True):
        assert piece.ranks == other.ranks and piece.top_ids == other.top_ids
        assert piece.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE[device.type])
        assert piece.top_logprobs == pytest.approx(other.top_logprobs, abs=TOLERANCE[device.type])


@pytest.mark.gpu
def test_a_row_that_scored_leaves_nothing_behind_for_the_next_one(device: torch.device) -> None:
    engine = graph_engine(device)
    _, first = run(engine, SCORING)
    engine.launch(BatchPlan(op=4, ends=[1]))
    engine.collect()
    scores, second = run(engine, SamplingParams(temperature=0.0))
    assert scores == [] and [row.tokens for row in second] == [row.tokens for row in first]
