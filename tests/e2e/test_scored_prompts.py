"""Log-probabilities of prompts through a disaggregated cluster equal those of transformers, cached pages or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from cluster_process import ClusterProcess
from grpc_client import InferenceEvents, prompt_events
from toy_model import byte_tokenizer

MODEL = "toy-llama"
PROMPT = (
    "The quick brown fox jumps over the lazy dog, again and again, until the evening comes and the hill is quiet. " * 2
)
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def client(local_cluster: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{local_cluster.http}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def reference(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """log-probabilities [positions, vocab]; row i is about the token at i + 1."""
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def warm(client: openai.OpenAI, prompt: str) -> None:
    """Twice: afterwards the prompt's pages are cached on both sides."""
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
    assert answer.usage.prompt_tokens_details.cached_tokens > 100


def check(entries: list[Any], logprobs: torch.Tensor, ids: list[int], alternatives: int) -> None:
    assert entries[0] is None and len(entries) == len(ids)
    for position in range(1, len(ids)):
        before, entry = logprobs[position - 1], entries[position]
        own = entry[str(ids[position])]
        assert own["logprob"] == pytest.approx(before[ids[position]].item(), abs=TOLERANCE)
        assert abs(own["rank"] - 1 - int((before > before[ids[position]]).sum())) <= 1
        best = before.topk(max(alternatives, 1))
        for value, token in zip(best.values[:alternatives].tolist(), best.indices[:alternatives].tolist(), strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize("alternatives", [0, 3])
def test_a_cached_prompt_is_scored_at_every_position(
    client: openai.OpenAI, toy_reference: torch.nn.Module, alternatives: int
) -> None:
    warm(client, PROMPT)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"prompt_logprobs": alternatives}
    )
    ids = byte_tokenizer().encode(PROMPT).ids
    check(answer.choices[0].prompt_logprobs, reference(toy_reference, ids), ids, alternatives)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    assert answer.choices[0].text == plain.choices[0].text


def test_chat_prompts_are_scored_with_their_template(client: openai.OpenAI, toy_reference: torch.nn.Module) -> None:
    messages = [{"role": "user", "content": "Tell me more."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, extra_body={"prompt_logprobs": 1}
    )
    ids = byte_tokenizer().encode("[user] Tell me more.\n[assistant] ").ids
    check(answer.prompt_logprobs, reference(toy_reference, ids), ids, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echoed_logprobs_run_on_from_the_prompt_into_the_text(
    client: openai.OpenAI, toy_reference: torch.nn.Module, max_tokens: int
) -> None:
    """`max_tokens` 0 is how a text is scored with OpenAI's API."""
    warm(client, PROMPT)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    )
    choice, ids = answer.choices[0], byte_tokenizer().encode(PROMPT).ids
    assert choice.text.startswith(PROMPT)
    found = choice.logprobs.token_logprobs
    assert (len(found), answer.usage.completion_tokens) == (len(ids) + max_tokens, max_tokens)
    logprobs = reference(toy_reference, ids)
    expected = [logprobs[position - 1, ids[position]].item() for position in range(1, len(ids))]
    assert found[0] is None and found[1 : len(ids)] == pytest.approx(expected, abs=TOLERANCE)
    if max_tokens:
        assert found[len(ids)] == pytest.approx(logprobs[-1].max().item(), abs=TOLERANCE)


def test_grpc_clients_hear_of_the_prompt_too(local_cluster: ClusterProcess, toy_reference: torch.nn.Module) -> None:
    ids = byte_tokenizer().encode(PROMPT).ids
    events: InferenceEvents = prompt_events(local_cluster.grpc, ids, prompt_logprobs=2, max_tokens=2)
    logprobs = reference(toy_reference, ids)
    assert [token.token_id for token in events.prompt] == ids[1:]
    expected = [logprobs[position - 1, ids[position]].item() for position in range(1, len(ids))]
    assert [token.logprob for token in events.prompt] == pytest.approx(expected, abs=TOLERANCE)
    assert events.kinds == ["started", "prompt_logprobs", "delta", "finished"]


def test_best_of_answers_the_likeliest(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "seed": 11, "logprobs": 0}
    every = client.completions.create(**settings, n=6)
    best = client.completions.create(**settings, best_of=6, n=2)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == every.usage.completion_tokens
