"""One streamed request: send, stamp every chunk, say what happened.

A stamp is taken when bytes arrive, before they are parsed. Nothing raises but a cancel: whatever goes wrong is a
record with its class of error.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

from bench_client.event_stream import EventReader, EventTooLong
from bench_client.records import Exchange, PlannedRequest

DONE = b"[DONE]"

DETAIL_CHARACTERS_MAX = 300

ERROR_BODY_BYTES_MAX = 65_536


class Clock:
    """Microseconds since it was made."""

    def __init__(self) -> None:
        self._zero_ns = time.perf_counter_ns()

    def now_us(self) -> int:
        return (time.perf_counter_ns() - self._zero_ns) // 1000


class ServerSaid(Exception):
    """The answer is an error, or no answer of this API. `kind` is its class."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """Of either API: completions have `text`, chat has `delta`."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Seen:
    """What one stream has shown so far."""

    def __init__(self) -> None:
        self.content_us: list[int] = []
        self.usage = _Usage()
        self.finish_reason = ""
        self.done = False

    def event(self, data: bytes, at_us: int) -> None:
        """Raises ServerSaid for an error event or something that is no chunk."""
        if data == DONE:
            self.done = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerSaid("malformed chunk", str(error)) from error
        if chunk.error is not None:
            told = chunk.error if isinstance(chunk.error, dict) else {}
            raise ServerSaid(f"error event {told.get('code') or ''}".strip(), str(told.get("message", chunk.error)))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            if choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content)):
                self.content_us.append(at_us)
            self.finish_reason = choice.finish_reason or self.finish_reason


async def exchange(
    http: httpx.AsyncClient, path: str, body: bytes, planned: PlannedRequest, clock: Clock, scheduled_us: int | None
) -> Exchange:
    """`http` carries base URL, headers and timeouts."""
    seen, kind, detail = Seen(), "", ""
    sent_us = clock.now_us()
    try:
        async with http.stream("POST", path, content=body) as response:
            await _read(response, seen, clock)
    except ServerSaid as said:
        kind, detail = said.kind, str(said)
    except EventTooLong as error:
        kind, detail = "malformed chunk", str(error)
    except httpx.TimeoutException as error:
        kind, detail = "timeout", type(error).__name__
    except httpx.ConnectError as error:
        kind, detail = "cannot connect", str(error)
    except httpx.HTTPError as error:
        kind, detail = "disconnected", str(error) or type(error).__name__
    return _record(planned, seen, scheduled_us, sent_us, clock.now_us(), kind, detail)


async def _read(response: httpx.Response, seen: Seen, clock: Clock) -> None:
    if response.status_code != 200:
        raise await _refusal(response)
    reader = EventReader()
    async for received in response.aiter_bytes():
        at_us = clock.now_us()
        for data in reader.feed(received):
            seen.event(data, at_us)
    if not seen.done:
        raise ServerSaid("stream cut", "the stream ended without [DONE]")
    if not seen.content_us and not seen.finish_reason:
        raise ServerSaid("empty stream", "no chunk carried text")


async def _refusal(response: httpx.Response) -> ServerSaid:
    received = bytearray()
    async for part in response.aiter_bytes():
        received += part
        if len(received) > ERROR_BODY_BYTES_MAX:
            break
    try:
        error = msgspec.json.decode(bytes(received))["error"]
        code, message = error.get("code") or error.get("type"), error.get("message")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code, message = "", received.decode(errors="replace")
    return ServerSaid(f"http {response.status_code} {code or ''}".strip(), str(message))


def _record(
    planned: PlannedRequest, seen: Seen, scheduled_us: int | None, sent_us: int, ended_us: int, kind: str, detail: str
) -> Exchange:
    details = seen.usage.prompt_tokens_details or {}
    return Exchange(
        index=planned.index,
        tokens_input_planned=planned.tokens_input,
        tokens_output_planned=planned.tokens_output,
        scheduled_us=scheduled_us,
        sent_us=sent_us,
        content_us=tuple(seen.content_us),
        ended_us=ended_us,
        tokens_input=seen.usage.prompt_tokens,
        tokens_output=seen.usage.completion_tokens,
        tokens_cached=_count(details.get("cached_tokens")),
        finish_reason=seen.finish_reason,
        error=kind,
        detail=detail[:DETAIL_CHARACTERS_MAX],
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
