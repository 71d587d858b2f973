"""The demo model through the cluster against transformers with the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cluster_process import ClusterProcess
from grpc_client import Generation, generate
from tokenizers import Tokenizer
from toy_model import worst_gap
from transformers import AutoModelForCausalLM

from launcher.demo_model import demo_model_path

TOP2_GAP_MAX = 0.02
"""Logits. Nearer than this the two best tokens are a tie, and the order of a sum decides."""

LONG = " ".join(f"Item {number}: the {number}th line of a long list." for number in range(110))
"""About 1,500 tokens."""

FEW = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "今日はとても天気がいいので、",
    "🙂 🚀 👨‍👩‍👧 means",
)
REST = (
    LONG,
    "1234567890 * 42 =",
    "Der schnelle braune Fuchs springt",
    "Le petit prince habitait une planète",
    "Напишите короткий рассказ о",
    "اكتب جملة عن البحر",
    "SELECT name, COUNT(*) FROM users GROUP BY",
    '{"name": "segue", "version": ',
    "A",
    "\n\n\n",
    "In mathematics, a prime number is",
    "To be, or not to be, that is the question:",
    "#include <stdio.h>\nint main(void) {\n",
    "Q: What is the boiling point of water?\nA:",
    LONG[:2000],
)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer that the cluster uses; its equality with the reference tokenizer is the engine tests' subject."""
    from engine.engine import read_model

    return Tokenizer.from_str(read_model(str(demo_model_path())).card.tokenizer_json)


def generate_all(cluster: ClusterProcess, texts: tuple[str, ...]) -> dict[str, Generation]:
    """All at once: batching changes no token, and the weights are read once for all."""
    with ThreadPoolExecutor(len(texts)) as pool:
        return dict(zip(texts, pool.map(lambda text: generate(cluster.grpc, text, max_tokens=64), texts), strict=True))


@pytest.fixture(scope="module")
def few(demo_cluster: ClusterProcess) -> dict[str, Generation]:
    return generate_all(demo_cluster, FEW)


@pytest.fixture(scope="module")
def rest(demo_cluster: ClusterProcess) -> dict[str, Generation]:
    return generate_all(demo_cluster, REST)


def check(result: Generation, reference: torch.nn.Module, prompt: list[int]) -> None:
    assert result.started is not None
    assert result.started.tokens_prompt == len(prompt)
    assert len(result.token_ids) == 64
    assert worst_gap(reference, prompt, result.token_ids) <= TOP2_GAP_MAX


@pytest.mark.parametrize("text", FEW)
def test_greedy_equals_the_reference(
    few: dict[str, Generation], reference: torch.nn.Module, tokenizer: Tokenizer, text: str
) -> None:
    check(few[text], reference, tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow
@pytest.mark.parametrize("text", REST)
def test_greedy_equals_the_reference_on_more_prompts(
    rest: dict[str, Generation], reference: torch.nn.Module, tokenizer: Tokenizer, text: str
) -> None:
    check(rest[text], reference, tokenizer.encode(text, add_special_tokens=False).ids)


def test_demo_model_lies_where_make_serve_looks() -> None:
    assert Path(demo_model_path()).stat().st_size > 50_000_000
