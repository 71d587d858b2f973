"""Requests of OpenAI's API as records, and what happens to fields that are not served.

Three kinds of other fields: *refused*, because their effect is missing here and pretending would be wrong; *inert*,
which change nothing in the answer; and *unknown* ones, logged once or refused with `strict_fields`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from conductor.gateway.http_body import convert
from conductor.gateway.request_fields import SamplingFields
from segue.errors import InvalidField

log = logging.getLogger(__name__)

UNKNOWN_NAMES_LOGGED_MAX = 256


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both completions APIs; those beyond OpenAI's are spelled as in vLLM."""

    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    """The smaller is the more urgent."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def prompt_only(self) -> bool:
        """OpenAI's way to score a text: nothing is generated, the prompt is echoed."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


INERT = frozenset(
    [
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "parallel_tool_calls",
        "request_id",
    ]
)


def _asked(value: Any) -> bool:
    """Whether a value asks for anything: defaults written out by a client do not."""
    return value not in (None, False, 0, "", [], {})


def _unless(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: _asked(value) and value not in harmless


REFUSED: dict[str, Callable[[Any], bool]] = {
    "tools": _asked,
    "tool_choice": _unless("none", "auto"),
    "functions": _asked,
    "function_call": _unless("none", "auto"),
    "response_format": _unless({"type": "text"}),
    "modalities": _unless(["text"]),
    "best_of": _unless(1),
    "length_penalty": _unless(1, 1.0),
    **dict.fromkeys(
        [
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "web_search_options",
            "suffix",
            "echo",
            "use_beam_search",
            "include_stop_str_in_output",
            "truncate_prompt_tokens",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "continue_final_message",
            "chat_template",
            "documents",
            "mm_processor_kwargs",
            "return_token_ids",
            "kv_transfer_params",
        ],
        _asked,
    ),
}


class FieldPolicy:
    """What to do with fields beside the served ones."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, decoded: dict[str, Any], kind: type[CommonRequest]) -> None:
        for name in decoded.keys() - set(kind.__struct_fields__):
            refuses = REFUSED.get(name)
            if refuses is not None:
                if refuses(decoded[name]):
                    raise InvalidField(name, "has an effect that is not supported here", code="unsupported_parameter")
            elif name not in INERT:
                self._unknown(name)

    def _unknown(self, name: str) -> None:
        if self._strict:
            raise InvalidField(name, "is not a field of this API", code="unknown_parameter")
        if name not in self._logged and len(self._logged) < UNKNOWN_NAMES_LOGGED_MAX:
            self._logged.add(name)
            log.warning("unknown request field %r is ignored (logged once)", name[:100])


def parse_chat(decoded: dict[str, Any], policy: FieldPolicy) -> ChatRequest:
    policy.check(decoded, ChatRequest)
    request = convert(decoded, ChatRequest)
    _check_stream_options(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidField("top_logprobs", "is only allowed with logprobs: true")
    if request.max_completion_tokens not in (None, request.max_tokens) and request.max_tokens is not None:
        raise InvalidField("max_completion_tokens", "differs from max_tokens, its older name; give one of them")
    return request


def parse_completion(decoded: dict[str, Any], policy: FieldPolicy) -> CompletionRequest:
    policy.check(decoded, CompletionRequest)
    request = convert(decoded, CompletionRequest)
    _check_stream_options(request)
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise InvalidField("best_of", "is only known at the end; it cannot be used with stream: true")
    return request


def _check_stream_options(request: CommonRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", "is only allowed with stream: true")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidField("prompt_logprobs", "has no place in a stream; leave out stream: true")


def chat_sampling(request: ChatRequest) -> SamplingFields:
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _sampling(request, max_tokens, logprobs, request.prompt_logprobs, names)


def completion_sampling(request: CompletionRequest, prompt_name: str) -> SamplingFields:
    """An echo with logprobs scores the prompt as `prompt_logprobs` does; a prompt alone takes one token, not shown."""
    names, prompt_logprobs = {"prompt": prompt_name}, request.prompt_logprobs
    if request.echoes_logprobs and (request.logprobs or 0) >= (prompt_logprobs or 0):
        prompt_logprobs, names["prompt_logprobs"] = request.logprobs, "logprobs"
    max_tokens = 1 if request.prompt_only else request.max_tokens
    return _sampling(request, max_tokens, request.logprobs, prompt_logprobs, names)


def _sampling(
    request: CommonRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    names: dict[str, str],
) -> SamplingFields:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    return SamplingFields(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        stop=stop,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        names=names,
    )
