"""Tenants at both front doors: names that are refused, limits that are reached, and cancels that find their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
from gateway_front import Front, saying, serving
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway.testing import FakeConductor, Script, toy_card
from segue import limits
from segue.config import FrontConfig, TenantLimits

TWO_AT_ONCE = TenantLimits(requests_max=2)
TEN_TOKENS = TenantLimits(tokens_per_minute=10)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def front(stack: AsyncExitStack, tenants: TenantLimits = TWO_AT_ONCE, reply: Any = None, **parts: Any) -> Front:
    conductor = FakeConductor([toy_card()], reply or saying("hello"))
    return await stack.enter_async_context(serving(conductor, FrontConfig(tenants=tenants), **parts))


def hanging(_: object) -> Script:
    return Script(tokens=[65, 66], hang=True)


async def ask(front: Front, tenant: str | bytes = "", **body: Any) -> httpx.Response:
    asked = {"model": "toy", "prompt": "hi", "max_tokens": 4, **body}
    async with httpx.AsyncClient(base_url=front.http_url) as client:
        return await client.post("/v1/completions", json=asked, headers={b"X-Segue-Tenant": _bytes(tenant)}, timeout=60)


def _bytes(tenant: str | bytes) -> bytes:
    return tenant.encode() if isinstance(tenant, str) else tenant


async def generate(front: Front, **fields: Any) -> grpc.aio.AioRpcError | None:
    """The error, if the stream ends with one."""
    request = inference_pb2.GenerateRequest(text="hi", **fields)
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        try:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def test_a_name_that_is_too_long_is_refused_by_field_and_limit(stack: AsyncExitStack) -> None:
    served = await front(stack)
    longest = "é" * (limits.TENANT_BYTES_MAX // 2)
    assert await generate(served, tenant=longest) is None
    assert (await ask(served, longest)).status_code == 200
    error = await generate(served, tenant=longest + "x")
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "tenant: has 129 bytes, at most 128 are allowed"
    answer = await ask(served, longest + "x")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Segue-Tenant"
    assert "has 129 bytes, at most 128 are allowed" in answer.json()["error"]["message"]


async def test_a_name_with_control_characters_or_bad_bytes_is_refused(stack: AsyncExitStack) -> None:
    served = await front(stack)
    error = await generate(served, tenant="a\nb")
    assert error is not None and "cannot be printed" in str(error.details())
    answer = await ask(served, b"\xff")
    assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


async def test_both_doors_mean_the_same_tenant(stack: AsyncExitStack) -> None:
    served = await front(stack)
    await generate(served, tenant="müller")
    await ask(served, "müller")
    first, second = served.conductor.submitted
    assert first.tenant == second.tenant == "müller"
    assert first.hash_root == second.hash_root


async def test_requests_over_the_limit_are_told_the_resource_and_when_to_come_back(stack: AsyncExitStack) -> None:
    served = await front(stack, reply=hanging)
    running = [asyncio.create_task(generate(served, tenant="a")) for _ in range(2)]
    while len(served.gateway.table) < 2:
        await asyncio.sleep(0.005)
    error = await generate(served, tenant="a")
    assert error is not None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "tenant 'a' has 2 live requests, at most 2 are allowed"
    metadata = dict(error.trailing_metadata() or ())
    assert metadata["resource"] == "tenant_requests" and int(metadata["retry-after-ms"]) > 0
    answer = await ask(served, "a")
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["resource"] == "tenant_requests"
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await served.idle()
    served.conductor.reply = saying("x")
    assert await generate(served, tenant="a") is None, "their places are free again"


async def test_each_choice_of_a_call_takes_a_place_and_a_call_has_all_or_none(stack: AsyncExitStack) -> None:
    served = await front(stack, reply=hanging)
    running = asyncio.create_task(generate(served, tenant="a"))
    while not len(served.gateway.table):
        await asyncio.sleep(0.005)
    assert (await ask(served, "a", n=2)).status_code == 429
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await served.idle()
    served.conductor.reply = saying("hello")
    assert (await ask(served, "a", n=2)).status_code == 200


async def test_tokens_of_prompt_and_answer_are_counted_and_the_wait_is_told(stack: AsyncExitStack) -> None:
    served = await front(stack, TEN_TOKENS, saying("0123456789012345"))
    assert (await ask(served, "a", prompt=[65] * 4, max_tokens=16)).status_code == 200
    await served.idle()
    answer = await ask(served, "a", prompt=[65] * 4)
    assert answer.status_code == 429
    assert answer.json()["error"]["resource"] == "tenant_tokens"
    assert "of its 10 tokens per minute" in answer.json()["error"]["message"]
    assert 80 <= int(answer.headers["Retry-After"]) <= 84, "14 too many, at 6 seconds each"
    assert (await ask(served, "b", prompt=[65] * 4)).status_code == 200


async def test_a_prompt_counts_once_however_many_choices_it_gets(stack: AsyncExitStack) -> None:
    served = await front(stack, TEN_TOKENS, saying(""))
    assert (await ask(served, "a", prompt=[65] * 4, n=2, max_tokens=1)).status_code == 200
    await served.idle()
    assert (await ask(served, "a", prompt=[65] * 4, max_tokens=1)).status_code == 200


async def test_a_prompt_that_no_minute_could_hold_is_the_callers_error(stack: AsyncExitStack) -> None:
    served = await front(stack, TEN_TOKENS)
    answer = await ask(served, "a", prompt=[65] * 11)
    assert answer.status_code == 400
    assert "has 11 tokens, a tenant may use 10 per minute" in answer.json()["error"]["message"]


async def test_more_choices_than_places_are_the_callers_error(stack: AsyncExitStack) -> None:
    served = await front(stack, TenantLimits(requests_max=3))
    answer = await ask(served, "b", prompt=[65], n=4)
    assert answer.status_code == 400
    assert "makes 4 requests of this call, a tenant may have 3 at once" in answer.json()["error"]["message"]


async def test_without_limits_nothing_is_counted(stack: AsyncExitStack) -> None:
    served = await front(stack, TenantLimits(), hanging)
    running = [asyncio.create_task(generate(served, tenant="a")) for _ in range(8)]
    while len(served.gateway.table) < 8:
        await asyncio.sleep(0.005)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def cancel(front: Front, request_id: str) -> bool:
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return bool((await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=60)).found)


async def test_a_cancel_finds_the_request_at_another_gateway(stack: AsyncExitStack) -> None:
    """Also past one that is gone; and two that know each other do not ask for ever."""
    peers: list[str] = ["127.0.0.1:1"]
    one = await front(stack, reply=hanging, peers=lambda: [*peers, two.grpc_address])
    two = await front(stack, reply=hanging, peers=lambda: [one.grpc_address])
    assert not await cancel(two, "mine")
    stream = asyncio.create_task(generate(two, request_id="mine"))
    while not len(two.gateway.table):
        await asyncio.sleep(0.005)
    assert await cancel(one, "mine")
    error = await stream
    assert error is not None and error.code() is grpc.StatusCode.CANCELLED


async def test_an_id_is_each_gateways_own_and_a_cancel_ends_all_that_have_it(stack: AsyncExitStack) -> None:
    one = await front(stack, reply=hanging, peers=lambda: [two.grpc_address])
    two = await front(stack, reply=hanging)
    streams = [asyncio.create_task(generate(served, request_id="same")) for served in (one, two)]
    while not (len(one.gateway.table) and len(two.gateway.table)):
        await asyncio.sleep(0.005)
    again = await generate(one, request_id="same")
    assert again is not None and again.code() is grpc.StatusCode.ALREADY_EXISTS
    assert await cancel(one, "same")
    for error in await asyncio.gather(*streams):
        assert error is not None and error.code() is grpc.StatusCode.CANCELLED
