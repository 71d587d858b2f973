"""What protects the gateway's own resources."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from gateway_front import Front, saying, serving

from conductor.gateway import intake, request_table
from conductor.gateway.testing import FakeConductor, Script, sentence_piece_tokenizer, toy_card
from segue import limits
from segue.config import FrontConfig

Start = Callable[..., Awaitable[Front]]


async def complete(front: Front, prompt: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=front.http_url, timeout=60) as client:
        return await client.post("/v1/completions", json={"prompt": prompt})


async def test_prompts_that_wait_for_the_tokenizer_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TEXTS_PENDING_MAX", 0)
    answer = await complete(await start(), "hello")
    assert (answer.status_code, answer.json()["error"]["resource"]) == (429, "tokenizer")
    assert answer.headers["retry-after"] == "1"


async def test_live_requests_are_bounded_and_places_come_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table.limits, "LIVE_REQUESTS_MAX", 1)
    front = await start(lambda request: Script(hang=True))
    first = asyncio.create_task(complete(front, "hello"))
    while not len(front.gateway.table):
        await asyncio.sleep(0.005)
    second = await complete(front, "hello")
    assert (second.status_code, second.json()["error"]["resource"]) == (429, "live_requests")
    first.cancel()
    await front.idle()
    front.conductor.reply = saying("ok")
    assert (await complete(front, "hello")).status_code == 200


async def test_a_long_prompt_is_tokenised_beside_the_loop_and_to_the_same_ids() -> None:
    text = "hello the ing " * 6000
    card = toy_card(sentence_piece_tokenizer(), max_model_len=limits.PROMPT_TOKENS_MAX)
    conductor = FakeConductor([card], lambda request: Script(tokens=[300], finish="length"))
    async with serving(conductor, FrontConfig()) as front:
        assert (await complete(front, text)).status_code == 200
    expected = sentence_piece_tokenizer().encode(text, add_special_tokens=False).ids
    assert conductor.submitted[0].tokens_prompt == len(expected) > intake.HASH_INLINE_TOKENS_MAX
    assert len(conductor.submitted[0].block_hashes) == len(expected) // 16


async def test_a_model_whose_tokenizer_cannot_be_used_is_unavailable_with_the_reason() -> None:
    card = toy_card()
    broken = type(card)(**{**{f: getattr(card, f) for f in card.__struct_fields__}, "tokenizer_json": "{}"})
    async with serving(FakeConductor([broken], saying("x")), FrontConfig()) as front:
        answer = await complete(front, "hello")
    assert answer.status_code == 503 and "tokenizer" in answer.json()["error"]["message"]
