"""Every row of the error table, through gRPC and HTTP alike: status, code, what is named; streams beside it go on.

`ROWS` has at least one case for each kind of RequestError that this front can answer with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from gateway_front import Front, client_id, saying
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway.testing import Script
from conductor.ports import RoutedRequest
from segue.errors import REQUEST_ERRORS, Overloaded, Unavailable

Start = Callable[..., Awaitable[Front]]
OUTSIDE = ("invalid_api_key", "permission_denied")
"""No front asks for keys yet."""


@dataclass
class Row:
    """The same mistake in both spellings; `None` where a front cannot make it."""

    name: str
    grpc_fields: dict[str, Any] | bytes | None
    http_body: dict[str, Any] | bytes | None
    grpc_code: str
    http_status: int
    code: str
    says: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


def sampled(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling": inference_pb2.SamplingParams(**fields)}


BAD = ("INVALID_ARGUMENT", 400)
IDS = inference_pb2.TokenIds
ROWS = [
    Row("empty prompt", {"text": ""}, {"prompt": ""}, *BAD, "prompt_empty", "at least 1 token"),
    Row("too long", {"tokens": IDS(ids=[1] * 300)}, {"prompt": [1] * 300}, *BAD, "context_length_exceeded", "45 more"),
    Row("no such token", {"tokens": IDS(ids=[70000])}, {"prompt": [70000]}, *BAD, "invalid_value", "outside of 0 .."),
    Row(
        "NaN",
        sampled(temperature=float("nan")),
        b'{"prompt":"a","temperature":NaN}',
        *BAD,
        "invalid_value",
        "temperature",
    ),
    Row("max_tokens 0", sampled(max_tokens=0), {"prompt": "a", "max_tokens": 0}, *BAD, "invalid_value", "max_tokens"),
    Row("bad UTF-8", b"\x1a\x02\xff\xfe", b'{"prompt":"\xff"}', *BAD, "invalid_value", "UTF-8"),
    Row(
        "could never fit", sampled(max_tokens=999), {"prompt": "a", "max_tokens": 999}, *BAD, "context_length_exceeded"
    ),
    Row("missing effect", None, {"prompt": "a", "suffix": "b"}, *BAD, "unsupported_parameter", "suffix"),
    Row(
        "not an image",
        None,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        *BAD,
        "unsupported_content_type",
    ),
    Row("50 MB", {"text": "a" * 50_000_000}, {"prompt": "a" * 50_000_000}, "RESOURCE_EXHAUSTED", 413, "body_too_large"),
    Row(
        "no such model",
        {"text": "a", "model": "gpt"},
        {"prompt": "a", "model": "gpt"},
        "NOT_FOUND",
        404,
        "model_not_found",
        "toy",
    ),
    Row(
        "model not ready",
        {"text": "a", "model": "later"},
        {"prompt": "a", "model": "later"},
        "UNAVAILABLE",
        503,
        "unavailable",
    ),
    Row(
        "id in use",
        {"text": "a", "request_id": "bystander"},
        {"prompt": "a"},
        "ALREADY_EXISTS",
        409,
        "duplicate_request_id",
        "bystander",
        {"x-request-id": "bystander"},
    ),
    Row("queue full", {"text": "full"}, {"prompt": "full"}, "RESOURCE_EXHAUSTED", 429, "overloaded", "queue is full"),
    Row("no instances", {"text": "gone"}, {"prompt": "gone"}, "UNAVAILABLE", 503, "unavailable", "no decode"),
    Row(
        "deadline",
        {"text": "hang"},
        {"prompt": "hang"},
        "DEADLINE_EXCEEDED",
        408,
        "deadline_exceeded",
        "",
        {"x-segue-deadline-ms": "60"},
        0.06,
    ),
    Row("our bug", {"text": "bug"}, {"prompt": "bug"}, "INTERNAL", 500, "internal_error", "log has the details"),
]


def reply(request: RoutedRequest) -> Script:
    """What the prompt, whose text is in its bytes, asks for."""
    text = bytes(request.token_ids[::4]).decode(errors="replace")
    match text:
        case "full":
            return Script(refuse=Overloaded("queue is full", resource="queue", retry_after_ms=1500))
        case "gone":
            return Script(refuse=Unavailable("no decode instance"))
        case "bug":
            raise RuntimeError("a bug")
    return saying("hello world")(request) if text == "ok" else Script(hang=True)


@asynccontextmanager
async def bystanders(front: Front) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Two streams that are in the middle of something, one on each front; the callable finishes them and checks."""
    request = inference_pb2.GenerateRequest(text="wait", request_id="bystander")
    body = {"prompt": "wait", "stream": True}
    async with (
        grpc.aio.insecure_channel(front.grpc_address) as channel,
        httpx.AsyncClient(base_url=front.http_url, trust_env=False, timeout=30) as client,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        other = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "bystander"}))
        while len(front.gateway.table) < 2:
            await asyncio.sleep(0.005)

        async def check() -> None:
            assert sorted(client_id(request) for request in front.conductor.submitted[:2]) == [
                "bystander",
                "cmpl-bystander",
            ]
            assert len(front.gateway.table) == 2, "a refused request is still live, or a bystander is not"
            assert not other.done() and not call.done()

        yield check
        call.cancel()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


def test_every_kind_of_error_has_a_row() -> None:
    assert {row.code for row in ROWS} | {"cancelled"} >= REQUEST_ERRORS.keys() - set(OUTSIDE)


@pytest.mark.parametrize("row", [row for row in ROWS if row.grpc_fields is not None], ids=lambda row: row.name)
async def test_grpc(start: Start, row: Row) -> None:
    front = await start(reply)
    given = row.grpc_fields
    data = given if isinstance(given, bytes) else inference_pb2.GenerateRequest(**given).SerializeToString()  # type: ignore[arg-type]
    async with bystanders(front) as check, grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = channel.unary_stream("/segue.v1.Inference/Generate")(data, timeout=row.timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        trailing = dict(caught.value.trailing_metadata() or ())
        assert caught.value.code().name == row.grpc_code
        if row.timeout_s is None:  # the client's own clock ends it without a word of ours
            assert row.says in caught.value.details()
            assert trailing.get("code", "internal_error") == row.code
            assert ("retry-after-ms" in trailing) == (row.code == "overloaded")
        while len(front.gateway.table) > 2:
            await asyncio.sleep(0.005)
        await check()


@pytest.mark.parametrize("row", [row for row in ROWS if row.http_body is not None], ids=lambda row: row.name)
async def test_http(start: Start, row: Row) -> None:
    front = await start(reply)
    body = row.http_body if isinstance(row.http_body, bytes) else json.dumps(row.http_body).encode()
    path = "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"
    async with (
        bystanders(front) as check,
        httpx.AsyncClient(base_url=front.http_url, trust_env=False, timeout=30) as client,
    ):
        answer = await client.post(path, content=body, headers=row.headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (row.http_status, row.code), error
        assert row.says in error["message"]
        assert ("retry-after" in answer.headers) == (row.code == "overloaded")
        await check()


async def test_a_cancel_is_cancelled_for_grpc_and_499_for_http(start: Start) -> None:
    front = await start(reply)
    async with (
        grpc.aio.insecure_channel(front.grpc_address) as channel,
        httpx.AsyncClient(base_url=front.http_url, trust_env=False, timeout=30) as client,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="wait", request_id="one"))
        await call.read()
        answer = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "two"})
        )
        while len(front.gateway.table) < 2:
            await asyncio.sleep(0.005)
        for name in ("one", "cmpl-two"):
            assert (await stub.Cancel(inference_pb2.CancelRequest(request_id=name))).found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert ((await answer).status_code, (await answer).json()["error"]["code"]) == (499, "cancelled")
    assert len(front.gateway.table) == 0
