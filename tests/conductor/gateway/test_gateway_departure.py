"""Clients that leave while the gateway is in the middle of sending to them: their requests end at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import grpc
import httpx
import pytest
from gateway_front import Front
from prometheus_client import CollectorRegistry
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.rpc_status import errors_to_status
from conductor.gateway.testing import Script
from segue.errors import DeadlineExceeded
from segue.plan import TokenLogprobs

Start = Callable[..., Awaitable[Front]]

TOKENS = 4000
CLIENTS = 40


async def test_clients_that_leave_in_full_stream_end_their_requests_without_the_garbage_collector(start: Start) -> None:
    """A send to a client that has just left fails inside of grpc, which then drops the handler's generator half-way."""
    front = await start(lambda _: Script(tokens=[5] * TOKENS, hang=True), max_model_len=3 * TOKENS)

    async def leave_after(pieces: int) -> None:
        request = inference_pb2.GenerateRequest(text="hello")
        request.sampling.max_tokens, request.sampling.ignore_eos = 2 * TOKENS, True
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        for _ in range(pieces):
            await call.read()
        call.cancel()

    gc.disable()
    try:
        async with grpc.aio.insecure_channel(front.grpc_address) as channel:
            await asyncio.gather(*(leave_after(1 + client % 7) for client in range(CLIENTS)))
            async with asyncio.timeout(10):
                await front.idle()
    finally:
        gc.enable()
    assert {reason for _, reason in front.conductor.finished} == {"cancelled"}


async def test_client_that_leaves_while_a_message_to_it_is_stuck_ends_its_request(start: Start) -> None:
    """Flow control stops the gateway inside of a send: cleaning up must not wait for the garbage collector."""
    logprobs = [TokenLogprobs(-1.0, [(token, -2.0) for token in range(20)])] * TOKENS
    script = Script(tokens=[5] * TOKENS, logprobs=logprobs, hang=True, tokens_per_step=50)
    front = await start(lambda _: script, max_model_len=3 * TOKENS)
    request = inference_pb2.GenerateRequest(text="hello")
    request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.logprobs = 2 * TOKENS, True, 20
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(front.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            await call.read()
            await asyncio.sleep(0.5)
            assert len(front.gateway.table) == 1
            call.cancel()
            async with asyncio.timeout(5):
                await front.idle()
    finally:
        gc.enable()
    assert [reason for _, reason in front.conductor.finished] == ["cancelled"]


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_ours(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    front = await start()
    host, port = front.http_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()
    async with asyncio.timeout(10), httpx.AsyncClient(trust_env=False) as client:
        while 'code="cancelled"' not in (await client.get(f"{front.http_url}/metrics")).text:
            await asyncio.sleep(0.01)
    assert "internal error" not in caplog.text


class LeftJustNow:
    """A call whose client is gone when its status is to be sent, as grpc tells of it."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), RuntimeError("a bug")])
async def test_a_status_that_nobody_can_be_told_cancels_the_call(error: Exception) -> None:
    with pytest.raises(asyncio.CancelledError):
        async with errors_to_status(LeftJustNow(), RequestMetrics(CollectorRegistry())):  # type: ignore[arg-type]
            raise error
