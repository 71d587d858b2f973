"""Every field and path of docs/api.md against a running cluster: each has the effect that its name promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from cluster_process import ClusterProcess
from toy_model import EOS, byte_tokenizer

MODEL = "toy-llama"
TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_to_id(EOS)
MESSAGES = [{"role": "user", "content": "Tell me more."}]
A, B = (TOKENIZER.token_to_id(letter) for letter in "AB")


@pytest.fixture(scope="module")
def client(local_cluster: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{local_cluster.http}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(local_cluster: ClusterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=local_cluster.http, trust_env=False, timeout=60) as opened:
        yield opened


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    """One completion of 12 tokens, greedy unless told otherwise; fields beyond OpenAI's travel as extra ones."""
    known = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    own = ("prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "logprobs", "logit_bias", "echo")
    extra = {name: value for name, value in fields.items() if name not in own}
    named = {name: value for name, value in fields.items() if name in own}
    return client.completions.create(**{**known, **named}, extra_body=extra)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_limits(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={name: 7, "ignore_eos": True}
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")


def test_stop_token_ids_end_the_text_and_min_tokens_forbids_them_until_then(client: openai.OpenAI) -> None:
    bias = {str(A): 100}
    ended = complete(client, logit_bias=bias, stop_token_ids=[A])
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    later = complete(client, logit_bias=bias, stop_token_ids=[A], min_tokens=5)
    assert (later.usage.completion_tokens, later.choices[0].finish_reason) == (6, "stop")


def test_stop_strings_count_from_min_tokens_on(client: openai.OpenAI) -> None:
    bias = {str(A): 100}
    assert complete(client, logit_bias=bias, stop="AA").choices[0].text == ""
    assert complete(client, logit_bias=bias, stop=["AA"], min_tokens=4).choices[0].text == "AAAA"


def test_the_end_token_ends_unless_it_is_ignored_and_shows_when_asked(client: openai.OpenAI) -> None:
    bias = {str(EOS_ID): 100}
    ended = complete(client, logit_bias=bias)
    assert (ended.choices[0].finish_reason, ended.choices[0].text) == ("stop", "")
    ignored = complete(client, logit_bias=bias, ignore_eos=True, max_tokens=3)
    assert (ignored.choices[0].finish_reason, ignored.choices[0].text) == ("length", "")
    shown = complete(client, logit_bias=bias, ignore_eos=True, max_tokens=3, skip_special_tokens=False)
    assert shown.choices[0].text == EOS * 3


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_at_their_end_leave_only_the_likeliest_token(client: openai.OpenAI, narrow: dict[str, float]) -> None:
    greedy = complete(client, logprobs=0).choices[0].logprobs.tokens
    sampled = complete(client, **{"temperature": 1.5, "seed": 3, "logprobs": 0, **narrow}).choices[0].logprobs.tokens
    assert sampled == greedy


@pytest.mark.parametrize("wide", [{"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_filters_that_are_off_change_nothing(client: openai.OpenAI, wide: dict[str, float]) -> None:
    settings = {"temperature": 1.3, "seed": 9, "logprobs": 0}
    assert complete(client, **settings, **wide).choices[0].text == complete(client, **settings).choices[0].text


def test_a_seed_repeats_its_tokens_and_another_one_does_not(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1, seed=seed).choices[0].text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 50}])
def test_penalties_turn_away_from_what_was_said(client: openai.OpenAI, penalty: dict[str, float]) -> None:
    """Two tokens are pushed up together, one a little more: without a penalty only that one is ever chosen."""
    more = 30 if "repetition_penalty" in penalty else 99
    bias = {str(A): more, str(B): more - 1}
    plain = Counter(complete(client, logit_bias=bias).choices[0].text)
    turned = Counter(complete(client, logit_bias=bias, **penalty).choices[0].text)
    assert max(plain.values()) > max(turned.values()), (plain, turned)


def test_logit_bias_demands_and_forbids(client: openai.OpenAI) -> None:
    assert complete(client, logit_bias={str(A): 60, str(B): 50}, max_tokens=3).choices[0].text == "AAA"
    assert complete(client, logit_bias={str(A): -100, str(B): 50}, max_tokens=3).choices[0].text == "BBB"


def test_n_choices(client: openai.OpenAI) -> None:
    answer = complete(client, n=4, temperature=1, seed=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.completion_tokens == 48


def test_logprobs_of_chat_and_completions_agree_with_themselves(client: openai.OpenAI) -> None:
    legacy = complete(client, logprobs=3, max_tokens=4).choices[0].logprobs
    assert all(
        max(top.values()) == value for top, value in zip(legacy.top_logprobs, legacy.token_logprobs, strict=True)
    )
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob


def test_include_usage_ends_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert last.choices == [] and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(part.usage is None for part in parts)


def test_inert_fields_change_nothing(client: openai.OpenAI) -> None:
    inert = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    more = {"safety_identifier": "s", "prompt_cache_key": "k", "request_id": "r", "response_format": {"type": "text"}}
    assert complete(client, **inert, **more).choices[0].text == complete(client).choices[0].text


@pytest.mark.parametrize(
    "name", ["suffix", "guided_regex", "use_beam_search", "allowed_token_ids", "structured_outputs"]
)
def test_effects_that_are_missing_are_refused_by_name(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **{name: ["x"]})
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_probes_models_and_version(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").json() == {"status": "ready", "models": [MODEL]}
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert set(http.get("/version").json()) == {"version"}
    assert "segue:prompt_tokens_total" in http.get("/metrics").text


def test_tokens_and_text_go_both_ways(http: httpx.Client) -> None:
    text = "h\u00e9llo"
    found = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == TOKENIZER.encode(text).ids
    assert (found["count"], found["max_model_len"], found["token_strs"][:2]) == (
        len(found["tokens"]),
        512,
        ["<s>", "h"],
    )
    bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == found["tokens"][1:] and bare["token_strs"] is None
    assert http.post("/detokenize", json={"model": MODEL, "tokens": bare["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == TOKENIZER.encode("[user] Tell me more.\n[assistant] ").ids
