"""Answers of OpenAI's API: one class per API, for streams and for whole answers.

A chunk's constant parts are encoded once per call; per token only the text is (about 1 us instead of 20 us for the
whole object).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from conductor.gateway.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, scored_tokens
from conductor.gateway.prompts_asked import PromptsAsked
from conductor.gateway.session_events import Emit, Summary
from conductor.gateway.text import TextCodec
from segue.plan import PromptScores

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk of one call repeats."""

    id: str
    model: str
    created: int
    include_usage: bool


class AnswerFormat(Protocol):
    def opening(self, index: int) -> bytes:
        """What precedes the first piece of a choice."""

    def piece(self, index: int, emit: Emit) -> bytes: ...

    def closing(self, index: int, reason: str) -> bytes: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...

    def choice(self, index: int, emit: Emit, reason: str) -> dict[str, Any]:
        """One choice of a whole answer."""

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]: ...


def usage_object(summaries: Sequence[Summary], choices_per_prompt: int) -> dict[str, Any]:
    """A prompt counts once, however many choices it got."""
    prompt = sum(summary.tokens_prompt for summary in summaries[::choices_per_prompt])
    cached = sum(summary.tokens_cached for summary in summaries[::choices_per_prompt])
    completion = sum(summary.tokens_generated for summary in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Frame:
    """Server-sent events around chunk objects with constant head and tail."""

    def __init__(self, head: AnswerHead, kind: str) -> None:
        fixed = encode({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self._start = b"data: " + fixed[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return self._start + choice + self._end

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._start + b'],"usage":' + encode(usage) + b"}\n\n"


class ChatFormat:
    def __init__(self, head: AnswerHead, codec: TextCodec, asked: PromptsAsked) -> None:
        self._head = head
        self._codec = codec
        self._asked = asked
        self._scores: PromptScores | None = None
        self._frame = _Frame(head, "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":""}')

    def piece(self, index: int, emit: Emit) -> bytes:
        if emit.logprobs is not None:
            logprobs = encode(chat_logprobs(self._codec, emit.token_ids, emit.logprobs))
            return self._chunk(index, b'{"content":%b}' % encode(emit.text), logprobs)
        return self._chunk(index, b'{"content":%b}' % encode(emit.text)) if emit.text else b""

    def closing(self, index: int, reason: str) -> bytes:
        return self._chunk(index, b"{}", reason=encode(reason))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)

    def choice(self, index: int, emit: Emit, reason: str) -> dict[str, Any]:
        self._scores = emit.scores
        logprobs = None if emit.logprobs is None else chat_logprobs(self._codec, emit.token_ids, emit.logprobs)
        message = {"role": "assistant", "content": emit.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        body = _whole(self._head, "chat.completion", choices, usage)
        if self._scores is None or self._asked.prompt_logprobs is None:
            return body
        (token_ids,) = self._asked.token_ids
        scores = prompt_logprobs(self._codec, token_ids, self._scores, self._asked.prompt_logprobs)
        return {**body, "prompt_logprobs": scores}

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null", *, reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._frame.chunk(choice)


class CompletionFormat:
    """`choices_per_prompt` consecutive choices belong to one prompt. An echo opens each of them; with log-probabilities
    it waits for those of the prompt, which come with the prompt's first choice."""

    def __init__(self, head: AnswerHead, codec: TextCodec, asked: PromptsAsked, choices_per_prompt: int) -> None:
        self._head = head
        self._codec = codec
        self._asked = asked
        self._per_prompt = choices_per_prompt
        self._frame = _Frame(head, "text_completion")
        self._offsets: dict[int, int] = {}
        self._scores: dict[int, PromptScores] = {}
        """Of streams, by prompt."""

    def opening(self, index: int) -> bytes:
        waits = self._asked.echo_logprobs is not None and index // self._per_prompt not in self._scores
        return b"" if waits or not self._asked.echo else self._echo_chunk(index)

    def piece(self, index: int, emit: Emit) -> bytes:
        part = b""
        if emit.scores is not None:
            self._scores[index // self._per_prompt] = emit.scores
            part = self._echo_chunk(index)
        if emit.logprobs is not None and (emit.token_ids or emit.text):
            return part + self._chunk(index, emit.text, encode(self._logprobs(index, emit)))
        return part + (self._chunk(index, emit.text) if emit.text else b"")

    def closing(self, index: int, reason: str) -> bytes:
        return self._chunk(index, "", reason=encode(reason))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)

    def choice(self, index: int, emit: Emit, reason: str) -> dict[str, Any]:
        prompt, asked = index // self._per_prompt, self._asked
        text, echoed = self._echo(index, emit.scores)
        logprobs = _joined(echoed, self._logprobs(index, emit))
        body = {"index": index, "text": text + emit.text, "logprobs": logprobs, "finish_reason": reason}
        if asked.prompt_logprobs is None or emit.scores is None:
            return body
        scores = prompt_logprobs(self._codec, asked.token_ids[prompt], emit.scores, asked.prompt_logprobs)
        return {**body, "prompt_logprobs": scores}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return _whole(self._head, "text_completion", choices, usage)

    def _echo(self, index: int, scores: PromptScores | None) -> tuple[str, dict[str, Any] | None]:
        asked, prompt = self._asked, index // self._per_prompt
        if not asked.echo:
            return "", None
        if asked.echo_logprobs is None or scores is None:
            return asked.texts[prompt], None
        entries = scored_tokens(scores, asked.echo_logprobs)
        body, self._offsets[index] = completion_logprobs(self._codec, asked.token_ids[prompt], entries, 0)
        return asked.texts[prompt], body

    def _echo_chunk(self, index: int) -> bytes:
        text, logprobs = self._echo(index, self._scores.get(index // self._per_prompt))
        return self._chunk(index, text, encode(logprobs))

    def _logprobs(self, index: int, emit: Emit) -> dict[str, Any] | None:
        if emit.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        body, self._offsets[index] = completion_logprobs(self._codec, emit.token_ids, emit.logprobs, offset)
        return body

    def _chunk(self, index: int, text: str, logprobs: bytes = b"null", *, reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, encode(text), logprobs, reason)
        return self._frame.chunk(choice)


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two legacy objects as one: every field is a list with one entry for each token."""
    if first is None or second is None:
        return second
    return {name: values + second[name] for name, values in first.items()}


def _whole(head: AnswerHead, kind: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    body = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return {**body, "choices": list(choices), "usage": usage}
