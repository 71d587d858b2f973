"""Answers to the completions APIs from the choices of one call: as a stream of events, or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from fastapi import Request, Response

from conductor.gateway.choices import Choices
from conductor.gateway.event_stream import EventStream, unless_gone
from conductor.gateway.http_errors import error_object, json_response, log_internal
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.openai_format import DONE, AnswerFormat, AnswerHead, encode, usage_object
from conductor.gateway.session_events import Emit
from segue.errors import Cancelled
from segue.plan import PromptScores, TokenLogprobs


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`sampled` choices of each prompt run, the best `n` of them are answered; a stream has as many as it samples."""

    format: AnswerFormat
    head: AnswerHead
    n: int
    sampled: int
    logprobs_shown: bool
    """Else they were sampled with, if at all, to find the best."""


async def stream_answer(http: Request, choices: Choices, answer: Answer, metrics: RequestMetrics) -> Response:
    """The first part is awaited here, so that a rejection still has its own status."""
    parts = _parts(choices, answer, metrics)
    first = await unless_gone(http.receive, anext(parts))
    return EventStream(
        first,
        parts,
        on_end=lambda: choices.stop(Cancelled("the client is gone")),
        headers={"X-Request-Id": answer.head.id},
    )


async def _parts(choices: Choices, answer: Answer, metrics: RequestMetrics) -> AsyncIterator[bytes]:
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
                    part += answer.format.opening(piece.index)
                if piece.emit is not None:
                    part += answer.format.piece(piece.index, piece.emit)
                if piece.end is not None and piece.end.error is None:
                    part += answer.format.closing(piece.index, piece.end.reason)
            if part:
                yield bytes(part)
    except Exception as error:
        if not opened:
            raise
        metrics.answered_with(error)
        yield b"data: " + encode(error_object(error, log_internal(error))) + b"\n\n" + DONE
        return
    usage = usage_object(choices.summaries(), answer.sampled)
    yield (answer.format.usage(usage) if answer.head.include_usage else b"") + DONE


async def whole_answer(choices: Choices, answer: Answer) -> Response:
    collected: dict[int, _Collected] = {}
    async for ready in choices.pieces():
        for piece in ready:
            own = collected.setdefault(piece.index, _Collected())
            if piece.emit is not None:
                own.add(piece.emit)
            if piece.end is not None:
                own.reason = piece.end.reason
    body = answer.format.whole(
        [
            answer.format.choice(index, own.emit(answer.logprobs_shown), own.reason)
            for index, own in enumerate(_chosen([collected[index] for index in sorted(collected)], answer))
        ],
        usage_object(choices.summaries(), answer.sampled),
    )
    response = json_response(body)
    response.headers["X-Request-Id"] = answer.head.id
    return response


def _chosen(collected: list[_Collected], answer: Answer) -> list[_Collected]:
    """The best `n` of each prompt's choices, each with the log-probabilities that its prompt's first choice brought."""
    chosen = []
    for first in range(0, len(collected), answer.sampled):
        group = collected[first : first + answer.sampled]
        for own in group:
            own.scores = group[0].scores
        best = group if answer.sampled == answer.n else sorted(group, key=_Collected.mean_logprob, reverse=True)
        chosen += best[: answer.n]
    return chosen


class _Collected:
    """One choice of a whole answer."""

    def __init__(self) -> None:
        self.reason = ""
        self.scores: PromptScores | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None

    def add(self, emit: Emit) -> None:
        self._token_ids += emit.token_ids
        self._texts.append(emit.text)
        self.scores = emit.scores or self.scores
        if emit.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *emit.logprobs]

    def mean_logprob(self) -> float:
        """Log-probability per token, by which `best_of` chooses; equal ones stay in the order of their seeds."""
        values = [entry.logprob for entry in self._logprobs or ()]
        return sum(values) / len(values) if values else 0.0

    def emit(self, logprobs_shown: bool) -> Emit:
        logprobs = self._logprobs if logprobs_shown else None
        return Emit(self._token_ids, "".join(self._texts), logprobs, self.scores)
