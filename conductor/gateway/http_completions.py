"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

from fastapi import Request, Response

from conductor.gateway.choices import Choices
from conductor.gateway.event_stream import EventStream, unless_gone
from conductor.gateway.http_body import read_object
from conductor.gateway.http_errors import error_object, json_response, log_internal
from conductor.gateway.intake import Call, Intake
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.model_catalog import UsableModel
from conductor.gateway.openai_fields import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    FieldPolicy,
    chat_sampling,
    completion_sampling,
    parse_chat,
    parse_completion,
)
from conductor.gateway.openai_format import (
    DONE,
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    encode,
    usage_object,
)
from conductor.gateway.openai_prompts import prompt_list, template_messages
from conductor.gateway.request_fields import CheckedRequest
from conductor.gateway.session_events import Emit
from conductor.gateway.validate import check_choices, check_request_id
from conductor.gateway.wall_clock import unix_seconds
from segue import limits
from segue.errors import Cancelled, InvalidField
from segue.plan import TokenLogprobs

COMPLETION_MAX_TOKENS_DEFAULT = 16
"""As OpenAI documents for completions; chat has no default but the model's length."""

REQUEST_ID_BYTES_MAX = limits.REQUEST_ID_BYTES_MAX - 16
"""Room for the prefix and the number of a choice."""

DEADLINE_MS_MAX = 24 * 3600 * 1000


class CompletionsApi:
    def __init__(self, intake: Intake, metrics: RequestMetrics, policy: FieldPolicy) -> None:
        self._intake = intake
        self._metrics = metrics
        self._policy = policy

    async def chat(self, http: Request) -> Response:
        arrived_us = self._intake.table.now_us()
        request = parse_chat(await read_object(http), self._policy)
        model = await self._intake.catalog.usable(request.model)
        prompts = [await self._chat_prompt(request, model)]
        head = self._head(http, "chatcmpl-", request, model)
        return await self._answer(http, request, model, prompts, ChatFormat(head, model.codec), head, arrived_us)

    async def complete(self, http: Request) -> Response:
        arrived_us = self._intake.table.now_us()
        request = parse_completion(await read_object(http), self._policy)
        model = await self._intake.catalog.usable(request.model)
        prompts = [
            await self._completion_prompt(request, model, name, prompt) for name, prompt in prompt_list(request.prompt)
        ]
        head = self._head(http, "cmpl-", request, model)
        return await self._answer(http, request, model, prompts, CompletionFormat(head, model.codec), head, arrived_us)

    async def _chat_prompt(self, request: ChatRequest, model: UsableModel) -> CheckedRequest:
        rendered = model.codec.render_chat(
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
        prompt_ids = await self._intake.tokenize_chat(model, rendered)
        return self._intake.check(model, prompt_ids, chat_sampling(request), max_tokens_default=None)

    async def _completion_prompt(
        self, request: CompletionRequest, model: UsableModel, name: str, prompt: str | list[int]
    ) -> CheckedRequest:
        if prompt in ("", []):
            raise InvalidField(name, "is empty; at least 1 token is needed", code="prompt_empty")
        fields = completion_sampling(request, name)
        prompt_ids = (
            await self._intake.tokenize(model, prompt, add_bos=request.add_special_tokens, name=name)
            if isinstance(prompt, str)
            else prompt
        )
        return self._intake.check(model, prompt_ids, fields, max_tokens_default=COMPLETION_MAX_TOKENS_DEFAULT)

    def _head(self, http: Request, prefix: str, request: CommonRequest, model: UsableModel) -> AnswerHead:
        given = http.headers.get("x-request-id", "")
        check_request_id(given, "X-Request-Id", bytes_max=REQUEST_ID_BYTES_MAX)
        return AnswerHead(
            id=prefix + (given or uuid.uuid4().hex),
            model=request.model or model.name,
            created=unix_seconds(),
            include_usage=request.include_usage,
        )

    async def _answer(
        self,
        http: Request,
        request: CommonRequest,
        model: UsableModel,
        prompts: Sequence[CheckedRequest],
        answer: AnswerFormat,
        head: AnswerHead,
        arrived_us: int,
    ) -> Response:
        n = check_choices(request.n)
        call = Call(
            request_id=head.id,
            arrived_us=arrived_us,
            deadline_us=_deadline_us(http, arrived_us),
            tenant=http.headers.get("x-segue-tenant", ""),
        )
        choices = Choices(self._intake.table)
        await choices.open(self._intake, model, call, prompts, n)
        try:
            if request.stream:
                return await self._stream(http, choices, answer, head, n)
            return await unless_gone(http.receive, _whole_answer(choices, answer, head, n))
        except BaseException:
            choices.stop(Cancelled("the client is gone"))
            raise

    async def _stream(
        self, http: Request, choices: Choices, answer: AnswerFormat, head: AnswerHead, n: int
    ) -> Response:
        """The first part is awaited here, so that a rejection still has its own status."""
        parts = self._parts(choices, answer, head, n)
        first = await unless_gone(http.receive, anext(parts))
        return EventStream(
            _with_first(first, parts),
            on_end=lambda: choices.stop(Cancelled("the client is gone")),
            headers={"X-Request-Id": head.id},
        )

    async def _parts(self, choices: Choices, answer: AnswerFormat, head: AnswerHead, n: int) -> AsyncIterator[bytes]:
        """Bytes of the stream; what is ready together is one part. An error after the first part is an event."""
        opened: set[int] = set()
        try:
            async for ready in choices.pieces():
                part = bytearray()
                for piece in ready:
                    if piece.end is not None and piece.end.error is not None and piece.emit is None:
                        continue
                    if piece.index not in opened:
                        opened.add(piece.index)
                        part += answer.opening(piece.index)
                    if piece.emit is not None:
                        part += answer.piece(piece.index, piece.emit)
                    if piece.end is not None and piece.end.error is None:
                        part += answer.closing(piece.index, piece.end.reason)
                if part:
                    yield bytes(part)
        except Exception as error:
            if not opened:
                raise
            self._metrics.answered_with(error)
            yield b"data: " + encode(error_object(error, log_internal(error))) + b"\n\n" + DONE
            return
        tail = answer.usage(usage_object(choices.summaries(), n)) if head.include_usage else b""
        yield tail + DONE


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


async def _whole_answer(choices: Choices, answer: AnswerFormat, head: AnswerHead, n: int) -> Response:
    collected: dict[int, _Collected] = {}
    async for ready in choices.pieces():
        for piece in ready:
            own = collected.setdefault(piece.index, _Collected())
            if piece.emit is not None:
                own.add(piece.emit)
            if piece.end is not None:
                own.reason = piece.end.reason
    body = answer.whole(
        [answer.choice(index, own.emit(), own.reason) for index, own in sorted(collected.items())],
        usage_object(choices.summaries(), n),
    )
    response = json_response(body)
    response.headers["X-Request-Id"] = head.id
    return response


class _Collected:
    """One choice of a whole answer."""

    def __init__(self) -> None:
        self.reason = ""
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None

    def add(self, emit: Emit) -> None:
        self._token_ids += emit.token_ids
        self._texts.append(emit.text)
        if emit.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *emit.logprobs]

    def emit(self) -> Emit:
        return Emit(self._token_ids, "".join(self._texts), self._logprobs)


def _deadline_us(http: Request, arrived_us: int) -> int:
    """From the header X-Segue-Deadline-Ms: milliseconds from the arrival; 0 without it."""
    given = http.headers.get("x-segue-deadline-ms")
    if given is None:
        return 0
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:12]) <= DEADLINE_MS_MAX:
        raise InvalidField("X-Segue-Deadline-Ms", f"must be an integer in 1 .. {DEADLINE_MS_MAX}")
    return arrived_us + int(given) * 1000
