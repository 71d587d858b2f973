"""What an answer says of its prompt: echo, its log-probabilities in both shapes, and the best of several choices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from gateway_front import Front, client_id, tokens_of
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway import rpc_views
from conductor.gateway.prompt_score_log import PromptScoreLog
from conductor.gateway.testing import Script, pretended_scores
from conductor.ports import RoutedRequest
from segue.plan import PromptScores, TokenLogprobs

Start = Callable[..., Awaitable[Front]]
PROMPT = "the end"
IDS = tokens_of(PROMPT)


def reply(text: str = " world") -> Callable[[RoutedRequest], Script]:
    tokens = tokens_of(text)
    entries = [TokenLogprobs(-0.5, [(0, -0.25)]) for _ in tokens]
    return lambda request: Script(
        tokens=tokens, finish="length", logprobs=entries if request.sampling.logprobs is not None else None
    )


@asynccontextmanager
async def client_of(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{front.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def complete(front: Front, prompt: Any = PROMPT, **fields: Any) -> Any:
    async with client_of(front) as client:
        return await client.completions.create(model="toy", prompt=prompt, **fields)


async def chunks(front: Front, **fields: Any) -> list[Any]:
    async with client_of(front) as client:
        stream = await client.completions.create(model="toy", prompt=PROMPT, stream=True, **fields)
        return [chunk.choices[0] async for chunk in stream if chunk.choices]


def joined(parts: list[Any], field: str) -> list[Any]:
    return [value for part in parts if part.logprobs is not None for value in getattr(part.logprobs, field)]


def expected_values() -> list[float | None]:
    return [None, *(-at / 8 for at in range(1, len(IDS)))]


async def test_vllms_prompt_logprobs_of_a_completion(start: Start) -> None:
    front = await start(reply())
    answer = await complete(front, extra_body={"prompt_logprobs": 2})
    first, *others = answer.choices[0].prompt_logprobs
    assert first is None and len(others) == len(IDS) - 1
    for position, entry in enumerate(others, 1):
        own = entry[str(IDS[position])]
        assert (own["logprob"], own["rank"]) == (-position / 8, 1 + position)
        assert tokens_of(own["decoded_token"]) == [IDS[position]]
        assert [entry[key]["rank"] for key in ("0", "1")] == [1, 2]
    assert answer.choices[0].logprobs is None


async def test_vllms_prompt_logprobs_of_a_chat_stand_beside_its_choices(start: Start) -> None:
    front = await start(reply())
    async with client_of(front) as client:
        answer = await client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "hi"}], n=2, extra_body={"prompt_logprobs": 0}
        )
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert all(len(entry) == 1 for entry in answer.prompt_logprobs[1:])


async def test_without_the_field_nothing_is_scored_or_said(start: Start) -> None:
    front = await start(reply())
    answer = await complete(front)
    assert not hasattr(answer.choices[0], "prompt_logprobs")
    assert front.conductor.submitted[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
async def test_echo_puts_the_prompt_before_the_text(start: Start, prompt: object) -> None:
    front = await start(reply())
    assert (await complete(front, prompt, echo=True)).choices[0].text == PROMPT + " world"
    assert front.conductor.submitted[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("alternatives", [0, 1, 3])
async def test_echo_with_logprobs_has_the_prompts_too(start: Start, alternatives: int) -> None:
    answer = await complete(await start(reply()), echo=True, logprobs=alternatives)
    found = answer.choices[0].logprobs
    tokens = IDS + tokens_of(" world")
    assert [tokens_of(token) for token in found.tokens] == [[token] for token in tokens]
    assert found.token_logprobs == expected_values() + [-0.5] * len(tokens_of(" world"))
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(len(tokens))]
    assert found.top_logprobs[0] is None
    assert len(found.top_logprobs[1]) == 1 + alternatives


async def test_a_streamed_echo_says_what_the_whole_one_says(start: Start) -> None:
    front = await start(reply())
    whole = (await complete(front, echo=True, logprobs=1)).choices[0]
    parts = await chunks(front, echo=True, logprobs=1)
    assert "".join(part.text for part in parts) == whole.text
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert joined(parts, field) == getattr(whole.logprobs, field)
    plain = await chunks(front, echo=True)
    assert plain[0].text == PROMPT and all(part.logprobs is None for part in plain)


async def test_every_streamed_choice_is_opened_by_the_echo_that_only_the_first_one_scored(start: Start) -> None:
    front = await start(reply())
    parts = await chunks(front, echo=True, logprobs=0, n=3)
    for index in range(3):
        own = [part for part in parts if part.index == index]
        assert own[0].text == PROMPT
        assert own[0].logprobs.token_logprobs == expected_values()
        assert "".join(part.text for part in own) == PROMPT + " world"
    asked = [request.sampling.prompt_logprobs for request in front.conductor.submitted]
    assert asked == [0, None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_with_echo_scores_a_text_and_generates_nothing(start: Start, stream: bool) -> None:
    front = await start(reply())
    if stream:
        parts = await chunks(front, echo=True, logprobs=1, max_tokens=0)
        text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
        values = joined(parts, "token_logprobs")
    else:
        answer = await complete(front, echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer.choices
        text, reason, values = choice.text, choice.finish_reason, choice.logprobs.token_logprobs
        assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, len(IDS))
    assert (text, reason, values) == (PROMPT, "length", expected_values())
    assert front.conductor.finished[0][1] == "length"


async def test_a_prompt_of_one_token_has_nothing_to_score(start: Start) -> None:
    answer = await complete(await start(reply()), [IDS[0]], echo=True, logprobs=1, extra_body={"prompt_logprobs": 1})
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].prompt_logprobs == [None]


async def test_a_prompt_to_be_scored_is_routed_as_if_nobody_had_it_cached(start: Start) -> None:
    front = await start(reply())
    long = [5] * 40
    await complete(front, long)
    await complete(front, long, echo=True, logprobs=0)
    assert [len(request.block_hashes) for request in front.conductor.submitted] == [2, 0]


async def test_a_replanned_request_is_scored_again_only_where_it_was_not(start: Start) -> None:
    tokens = tokens_of(" world and the end")

    def failing(request: RoutedRequest) -> Script:
        return Script(tokens=tokens, finish="length", fail_after=1 if request.attempt == 1 else None)

    front = await start(failing)
    answer = await complete(front, echo=True, extra_body={"prompt_logprobs": 0})
    assert answer.choices[0].text == PROMPT + " world and the end"
    assert [request.sampling.prompt_logprobs for request in front.conductor.submitted] == [0, None]
    assert len(answer.choices[0].prompt_logprobs) == len(IDS)


async def test_best_of_answers_the_choices_of_the_best_mean_logprob(start: Start) -> None:
    values = {"0": [-1.0, -1.0], "1": [-0.1], "2": [-0.3, -0.3, -0.3], "3": [-4.0]}

    def scored(request: RoutedRequest) -> Script:
        name = client_id(request)[-1]
        logprobs = [TokenLogprobs(value) for value in values[name]]
        return Script(tokens=tokens_of(name) * len(logprobs), finish="length", logprobs=logprobs)

    front = await start(scored)
    answer = await complete(front, best_of=4, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "1"), (1, "222")]
    assert answer.usage.completion_tokens == 7
    assert all(choice.logprobs is None for choice in answer.choices)
    shown = await complete(front, best_of=4, n=1, logprobs=0)
    assert shown.choices[0].logprobs.token_logprobs == [-0.1]


async def test_best_of_is_chosen_prompt_by_prompt(start: Start) -> None:
    def scored(request: RoutedRequest) -> Script:
        name = client_id(request)[-1]
        return Script(tokens=tokens_of(name), finish="length", logprobs=[TokenLogprobs(-abs(int(name) - 2.1))])

    answer = await complete(await start(scored), ["a", "b"], best_of=2)
    assert [choice.text for choice in answer.choices] == ["1", "2"]


async def test_grpc_says_what_it_knows_of_the_prompt_before_the_first_delta(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_views, "PROMPT_TOKENS_PER_MESSAGE", 4)
    front = await start(reply())
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=range(60, 70)))
    request.sampling.prompt_logprobs = 2
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        events = [event async for event in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:5] == ["started", "prompt_logprobs", "prompt_logprobs", "prompt_logprobs", "delta"]
    told = [event.prompt_logprobs for event in events[1:4]]
    assert [message.position for message in told] == [1, 5, 9]
    tokens = [token for message in told for token in message.tokens]
    assert [token.token_id for token in tokens] == list(range(61, 70))
    assert [token.logprob for token in tokens] == [-at / 8 for at in range(1, 10)]
    assert [top.token_id for top in tokens[0].top] == [0, 1]
    assert (tokens[0].rank, len(tokens[0].text)) == (2, 1)


def test_scores_are_kept_once_however_often_they_come() -> None:
    log = PromptScoreLog(9, 1)
    for begin, end in ((1, 4), (1, 2), (3, 7), (1, 9)):
        assert log.add(pretended_scores(end, 1, begin)) == ""
    assert log.is_complete
    assert log.take() == pretended_scores(9, 1)


@pytest.mark.parametrize(
    "scores",
    [
        pretended_scores(6, 1, 3),
        pretended_scores(6, 2),
        PromptScores(1, 1, [float("nan")], [1], [0], [0.0]),
    ],
)
def test_scores_that_do_not_fit_are_a_fault(scores: PromptScores) -> None:
    log = PromptScoreLog(9, 1)
    assert log.add(scores)
    assert log.position_next == 1
