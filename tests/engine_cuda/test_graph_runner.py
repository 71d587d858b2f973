"""The graph runner against the plain engine on the CPU: same model, same requests, same tokens."""

from __future__ import annotations

import random

import pytest
import torch

from segue.sampling_params import SamplingParams
from tests.engine_cuda.driving import Request, generate, graph_engine, reference_engine


def requests_of(count: int, tokens: int, *, seed: int = 1, **sampling: object) -> dict[int, Request]:
    rng = random.Random(seed)
    return {
        seq: Request(
            [rng.randrange(8, 200) for _ in range(rng.randint(1, PROMPT_MAX))],
            SamplingParams(temperature=0.0, max_tokens=rng.randint(1, tokens), **sampling),
        )
        for seq in range(count)
    }


TOKENS, PROMPT_MAX = (12, 40) if torch.cuda.is_available() else (3, 9)

CASES = (
    [(2, 1, 2)] if not torch.cuda.is_available() else [(n, d, s) for n in (1, 3) for d, s in ((0, 1), (1, 1), (1, 3))]
)
"""(requests, pipeline depth, steps_max); few of them in the interpreter, where a token takes a second."""


@pytest.mark.parametrize(("count", "depth", "steps_max"), CASES)
def test_greedy_tokens_equal_the_plain_engine(device: torch.device, count: int, depth: int, steps_max: int) -> None:
    requests = requests_of(count, TOKENS, ignore_eos=True)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=depth, steps_max=steps_max) == expected


@pytest.mark.gpu
def test_seeded_temperature_rows_equal_the_plain_engine(device: torch.device) -> None:
    requests = requests_of(4, TOKENS, seed=5)
    for seq, request in requests.items():
        sampling = SamplingParams(temperature=[0.0, 0.7, 1.3, 1.0][seq], seed=2**63 + seq, max_tokens=TOKENS)
        requests[seq] = Request(request.prompt, sampling)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=1) == expected


@pytest.mark.slow
def test_rows_with_filters_and_penalties_share_the_tables_with_plain_rows(device: torch.device) -> None:
    requests = requests_of(1, TOKENS, seed=9, ignore_eos=True)
    special = SamplingParams(
        temperature=0.9, top_k=5, frequency_penalty=0.5, seed=4, max_tokens=TOKENS, ignore_eos=True
    )
    requests[3] = Request([11, 12, 13, 14], special)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=1) == expected


@pytest.mark.gpu
def test_more_requests_than_rows_all_finish_as_in_the_plain_engine(device: torch.device) -> None:
    requests = requests_of(11, 6, seed=2)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=1) == expected
