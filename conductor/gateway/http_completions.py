"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import Request, Response

from conductor.gateway.choices import Choices
from conductor.gateway.event_stream import unless_gone
from conductor.gateway.http_answers import Answer, stream_answer, whole_answer
from conductor.gateway.http_body import read_object
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
from conductor.gateway.openai_format import AnswerHead, ChatFormat, CompletionFormat
from conductor.gateway.openai_prompts import prompt_list, template_messages
from conductor.gateway.prompts_asked import asked_by_chat, asked_by_completion
from conductor.gateway.request_fields import CheckedRequest, with_sampling
from conductor.gateway.validate import check_choices, check_priority, check_request_id, check_tenant
from conductor.gateway.wall_clock import unix_seconds
from segue import limits
from segue.errors import Cancelled, InvalidField

COMPLETION_MAX_TOKENS_DEFAULT = 16
"""As OpenAI documents for completions; chat has no default but the model's length."""

REQUEST_ID_BYTES_MAX = limits.REQUEST_ID_BYTES_MAX - 16
"""Room for the prefix and the number of a choice."""

TENANT_HEADER = "X-Segue-Tenant"

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
        n, sampled = check_choices(request.n, None, 1)
        prompt = await self._chat_prompt(request, model)
        head = self._head(http, "chatcmpl-", request, model)
        shape = ChatFormat(head, model.codec, asked_by_chat(request, prompt))
        answer = Answer(format=shape, head=head, n=n, sampled=sampled, logprobs_shown=bool(request.logprobs))
        return await self._answer(http, request, model, [prompt], answer, _call(http, request, head.id, arrived_us))

    async def complete(self, http: Request) -> Response:
        arrived_us = self._intake.table.now_us()
        request = parse_completion(await read_object(http), self._policy)
        model = await self._intake.catalog.usable(request.model)
        given = prompt_list(request.prompt)
        n, sampled = check_choices(request.n, request.best_of, len(given))
        prompts = [await self._completion_prompt(request, model, name, prompt) for name, prompt in given]
        if sampled > n and request.logprobs is None:
            prompts = [with_sampling(prompt, logprobs=0) for prompt in prompts]
        head = self._head(http, "cmpl-", request, model)
        asked = asked_by_completion(request, [prompt for _, prompt in given], prompts, model.codec)
        shape = CompletionFormat(head, model.codec, asked, n)
        answer = Answer(format=shape, head=head, n=n, sampled=sampled, logprobs_shown=request.logprobs is not None)
        call = _call(http, request, head.id, arrived_us, prompt_only=request.prompt_only)
        return await self._answer(http, request, model, prompts, answer, call)

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
        answer: Answer,
        call: Call,
    ) -> Response:
        choices = Choices(self._intake.table)
        await choices.open(self._intake, model, call, prompts, answer.sampled)
        try:
            if request.stream:
                return await stream_answer(http, choices, answer, self._metrics)
            return await unless_gone(http.receive, whole_answer(choices, answer))
        except BaseException:
            choices.stop(Cancelled("the client is gone"))
            raise


def _call(
    http: Request, request: CommonRequest, request_id: str, arrived_us: int, *, prompt_only: bool = False
) -> Call:
    check_priority(request.priority or 0)
    return Call(
        request_id=request_id,
        arrived_us=arrived_us,
        deadline_us=_deadline_us(http, arrived_us),
        tenant=_tenant(http),
        priority=request.priority or 0,
        prompt_only=prompt_only,
    )


def _tenant(http: Request) -> str:
    """From the header X-Segue-Tenant, in UTF-8 as the `tenant` of a gRPC request is."""
    try:
        tenant = http.headers.get("x-segue-tenant", "").encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidField(TENANT_HEADER, "is not valid UTF-8") from error
    check_tenant(tenant, TENANT_HEADER)
    return tenant


def _deadline_us(http: Request, arrived_us: int) -> int:
    """From the header X-Segue-Deadline-Ms: milliseconds from the arrival; 0 without it."""
    given = http.headers.get("x-segue-deadline-ms")
    if given is None:
        return 0
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:12]) <= DEADLINE_MS_MAX:
        raise InvalidField("X-Segue-Deadline-Ms", f"must be an integer in 1 .. {DEADLINE_MS_MAX}")
    return arrived_us + int(given) * 1000
