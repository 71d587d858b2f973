"""The `openai` client, unmodified, against a disaggregated cluster of the toy model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from cluster_process import ClusterProcess
from toy_model import byte_tokenizer

MODEL = "toy-llama"


@pytest.fixture(scope="module")
def client(local_cluster: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{local_cluster.http}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def messages(content: object = "Tell me more.") -> list[dict[str, object]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_streams_what_it_returns_at_once(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "messages": messages(), "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_content_parts_are_text(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "more."}]
    plain = client.chat.completions.create(messages=messages(), **settings)
    parted = client.chat.completions.create(messages=messages(parts), **settings)
    assert parted.choices[0].message.content == plain.choices[0].message.content


def test_completion_prompt_as_text_list_and_token_ids(client: openai.OpenAI) -> None:
    text = "Once upon a time"
    ids = byte_tokenizer().encode(text).ids
    settings = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    as_text = client.completions.create(prompt=text, **settings)
    as_list = client.completions.create(prompt=[text, text], **settings)
    as_ids = client.completions.create(prompt=ids, **settings)
    assert [choice.text for choice in as_list.choices] == [as_text.choices[0].text] * 2
    assert as_ids.choices[0].text == as_text.choices[0].text
    assert as_text.usage.prompt_tokens == len(ids)


def test_completion_streams_what_it_returns_at_once(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**settings)
    streamed = client.completions.create(**settings, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_stop_string_cuts_the_text_before_it(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**settings).choices[0].text
    stop = text[10:13]
    stopped = client.completions.create(**settings, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failed:
        client.chat.completions.create(model="other", messages=messages())
    assert failed.value.code == "model_not_found"


def test_prompt_that_is_too_long_is_a_400_that_names_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model=MODEL, prompt=[5] * 600, max_tokens=1)
