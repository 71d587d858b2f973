"""A prefill and a decode process on one GPU: pages go by CUDA IPC, tokens are those of one process for both roles."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cluster_process import ClusterProcess, running
from grpc_client import Generation, cluster_view, generate
from toy_model import byte_tokenizer, worst_gap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OPTIONS = ("--local-processes", "--device", "cuda", "--dtype", "float32", "--block-size", "16", "--kv-pages", "256")
STEPS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--pipeline-depth", "1")
LONG = "a prompt of several chunks and pages, " * 9
PROMPTS = ("Once upon a time", LONG, LONG + "which goes on differently", "x" * 15, "y" * 16, "🙂")
SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 5, "frequency_penalty": 0.3, "logprobs": 2}


@pytest.fixture(scope="module")
def pair(toy_folder: Path, toy_reference: torch.nn.Module) -> Iterator[ClusterProcess]:
    yield from running("--model", str(toy_folder), "--prefill", "1", "--decode", "1", *OPTIONS, *STEPS)


@pytest.fixture(scope="module")
def answers(pair: ClusterProcess) -> dict[str, Generation]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return dict(zip(PROMPTS, pool.map(lambda text: generate(pair.grpc, text), PROMPTS), strict=True))


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_tokens_are_the_references(
    answers: dict[str, Generation], toy_reference: torch.nn.Module, text: str
) -> None:
    result = answers[text]
    assert result.finished is not None and len(result.token_ids) == 24
    assert worst_gap(toy_reference, byte_tokenizer().encode(text).ids, result.token_ids) <= 1e-3


def test_tokens_equal_those_of_one_process(
    pair: ClusterProcess, answers: dict[str, Generation], toy_folder: Path
) -> None:
    expected = {text: generate(pair.grpc, text, **SEEDED).token_ids for text in PROMPTS}
    ones = running("--model", str(toy_folder), "--aggregated", "1", *OPTIONS, *STEPS)
    one = next(ones)
    try:
        assert {text: generate(one.grpc, text).token_ids for text in PROMPTS} == {
            text: answer.token_ids for text, answer in answers.items()
        }
        assert {text: generate(one.grpc, text, **SEEDED).token_ids for text in PROMPTS} == expected
    finally:
        ones.close()


def test_both_instances_serve(pair: ClusterProcess) -> None:
    assert len(cluster_view(pair.grpc).instances) == 2
