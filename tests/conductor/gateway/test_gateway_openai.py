"""The OpenAI surface through OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import openai
import pytest
from gateway_front import Front, client_id, saying, tokens_of

from conductor.gateway.testing import Script
from conductor.ports import RoutedRequest
from segue.errors import Overloaded, Unavailable
from segue.plan import TokenLogprobs

Start = Callable[..., Awaitable[Front]]
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{front.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def with_logprobs(text: str) -> Callable[[RoutedRequest], Script]:
    tokens = tokens_of(text)
    entries = [TokenLogprobs(-0.5, [(token_id, -0.5), (0, float("-inf"))]) for token_id in tokens]
    return lambda request: Script(tokens=tokens, finish="length", logprobs=entries)


async def test_chat_answers_whole(start: Start) -> None:
    front = await start(saying("hello 漢字", tokens_cached=3))
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="toy", messages=HI)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello 漢字", "stop")
    prompt = tokens_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens_of("hello 漢字")) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


async def test_chat_streams_role_first_then_text_then_reason_then_usage(start: Start) -> None:
    front = await start(saying("hello 👩‍👧 world"))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(
            model="toy", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello 👩‍👧 world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_without_include_usage_there_is_no_usage_chunk(start: Start) -> None:
    front = await start()
    async with client_of(front) as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [104, 105], [[104, 105]]])
async def test_completions_take_four_shapes_of_prompt(start: Start, prompt: object) -> None:
    front = await start(saying("ok"))
    async with client_of(front) as client:
        answer = await client.completions.create(model="toy", prompt=prompt)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ok", "stop")
    assert answer.object == "text_completion"


async def test_completions_stream(start: Start) -> None:
    front = await start(saying("hello world"))
    async with client_of(front) as client:
        stream = await client.completions.create(model="toy", prompt="x", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_completions_generate_16_tokens_unless_told_otherwise(start: Start) -> None:
    front = await start(saying("x"))
    async with client_of(front) as client:
        await client.completions.create(model="toy", prompt="x")
        await client.chat.completions.create(model="toy", messages=HI, max_completion_tokens=5)
        await client.chat.completions.create(model="toy", messages=HI)
    limits = [request.sampling.max_tokens for request in front.conductor.submitted]
    assert limits[:2] == [16, 5]
    assert limits[2] == 256 - front.conductor.submitted[2].tokens_prompt


async def test_n_choices_have_seeds_of_their_own_and_share_the_prompt_in_usage(start: Start) -> None:
    front = await start(lambda request: Script(tokens=tokens_of(client_id(request)[-1]), finish="length"))
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="toy", messages=HI, n=3, seed=5)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "0"), (1, "1"), (2, "2")]
    seeds = [request.sampling.seed for request in front.conductor.submitted]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert answer.usage.prompt_tokens == front.conductor.submitted[0].tokens_prompt
    assert answer.usage.completion_tokens == 3


async def test_prompts_times_n_are_indexed_prompt_by_prompt(start: Start) -> None:
    front = await start(saying("ok"))
    async with client_of(front) as client:
        answer = await client.completions.create(model="toy", prompt=["a", "the"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [request.token_ids for request in front.conductor.submitted]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert answer.usage.prompt_tokens == 2


async def test_streamed_choices_each_get_role_text_and_reason(start: Start) -> None:
    front = await start(saying("hello world", step_s=0.001))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, n=2, stream=True)
        chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "hello world"
        assert own[-1].finish_reason == "stop"


async def test_stop_strings_cut_the_stream_and_end_the_request(start: Start) -> None:
    front = await start(saying("hello world END never seen", step_s=0.001))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True, stop=["END"])
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world "
    assert chunks[-1].choices[0].finish_reason == "stop"
    await front.idle()
    assert front.conductor.finished


async def test_length_is_the_reason_when_max_tokens_is_reached(start: Start) -> None:
    front = await start(saying("hello world and the rest"))
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="toy", messages=HI, max_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


async def test_chat_log_probabilities(start: Start) -> None:
    front = await start(with_logprobs("hello world"))
    async with client_of(front) as client:
        answer = await client.chat.completions.create(
            model="toy", messages=HI, logprobs=True, top_logprobs=2, max_tokens=9
        )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "hello world"
    assert bytes(content[0].bytes).decode() == content[0].token
    assert [other.logprob for other in content[0].top_logprobs] == [-0.5, -9999.0]


async def test_streamed_log_probabilities_cover_every_token(start: Start) -> None:
    front = await start(with_logprobs("hello 漢字"))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(
            model="toy", messages=HI, logprobs=True, stream=True, max_tokens=30
        )
        entries = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content
        ]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "hello 漢字"


async def test_completion_log_probabilities_have_offsets(start: Start) -> None:
    front = await start(with_logprobs("hello world"))
    async with client_of(front) as client:
        answer = await client.completions.create(model="toy", prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == "hello world"
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert logprobs.token_logprobs[0] == -0.5 and logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5


async def test_models_are_listed(start: Start) -> None:
    front = await start()
    async with client_of(front) as client:
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.models.retrieve("toy")).id == "toy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_overload_is_429_with_retry_after_also_for_streams(start: Start, stream: bool, late: bool) -> None:
    error = Overloaded("queue is full", resource="queue", retry_after_ms=1500)
    front = await start(lambda request: Script(reject=error) if late else Script(refuse=error))
    async with client_of(front) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="toy", messages=HI, stream=stream)
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.body["resource"] == "queue"


async def test_no_instances_is_503(start: Start) -> None:
    front = await start(lambda request: Script(refuse=Unavailable("no decode instance")))
    async with client_of(front) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="toy", messages=HI)
    assert caught.value.status_code == 503


async def test_an_error_in_the_middle_of_a_stream_is_an_error_event(start: Start) -> None:
    tokens = tokens_of("hello world")
    front = await start(lambda request: Script(tokens=tokens, finish="error", error="NaN", step_s=0.01))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            async for _ in stream:
                pass


async def test_one_failing_choice_ends_the_others(start: Start) -> None:
    def reply(request: RoutedRequest) -> Script:
        bad = client_id(request).endswith("-1")
        return Script(refuse=Unavailable("no room")) if bad else Script(tokens=tokens_of("x"), hang=True)

    front = await start(reply)
    async with client_of(front) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="toy", messages=HI, n=3)
    assert len(front.gateway.table) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(start: Start, stream: bool) -> None:
    front = await start(saying("hello", hang=True))
    async with client_of(front) as client:
        call = asyncio.create_task(client.chat.completions.create(model="toy", messages=HI, stream=stream))
        while not len(front.gateway.table):
            await asyncio.sleep(0.005)
        if stream:
            await (await call).close()
        else:
            call.cancel()
        await front.idle()
    assert [reason for _, reason in front.conductor.finished] == ["cancelled"]


async def test_a_deadline_header_gives_408(start: Start) -> None:
    front = await start(lambda request: Script(hang=True))
    async with client_of(front) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="toy", messages=HI, extra_headers={"X-Segue-Deadline-Ms": "50"})
    assert caught.value.status_code == 408


async def test_the_clients_request_id_is_used_and_returned(start: Start) -> None:
    front = await start()
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="toy", messages=HI, extra_headers={"X-Request-Id": "abc"})
    assert answer.id == "chatcmpl-abc"
    assert front.conductor.submitted[0].request_id.startswith("chatcmpl-abc~")


async def test_sampling_beyond_openai_is_understood(start: Start) -> None:
    front = await start()
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [9]}
    async with client_of(front) as client:
        await client.chat.completions.create(
            model="toy", messages=HI, logit_bias={"5": -100}, extra_body={**extra, "ignore_eos": True}
        )
    given = front.conductor.submitted[0].sampling
    assert (given.top_k, given.min_p, given.repetition_penalty, given.min_tokens) == (7, 0.1, 1.2, 1)
    assert (given.stop_token_ids, given.ignore_eos, given.logit_bias) == ((9,), True, {5: -100.0})
