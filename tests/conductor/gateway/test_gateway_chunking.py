"""Same bytes in other pieces, same events: bodies of requests, and tokens on their way from instances."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from conductor.gateway.http_body import read_object
from conductor.gateway.session import Session
from conductor.gateway.session_events import Emit, End, Placed, SessionSpec, Submitted
from conductor.gateway.testing import DECODE, pretended_scores, toy_card
from conductor.gateway.text import TextCodec
from conductor.ports import Placement, ReceivedTokens
from segue.errors import InvalidField, RequestError
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams

CODEC = TextCodec(toy_card())
BODIES = [
    b'{"prompt": "h\xc3\xa9llo", "n": 2}',
    b'{"a": {"b": [1, 2.5, null]}}',
    b'{"a": "\xff"}',
    b'{"a": NaN}',
    b"[1]",
    b"{",
]
TEXT = "the 漢字 world stop END 👩‍👧 the"
IDS = CODEC.encode_now(TEXT)
PROMPT = 9


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def read(pieces: list[bytes]) -> object:
    """What the body is read as, or what is wrong with it."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    feed = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(feed)

    try:
        return asyncio.run(read_object(Request({"type": "http", "headers": []}, receive)))
    except RequestError as error:
        return (type(error), error.message)


@given(st.sampled_from(BODIES), st.lists(st.integers(0, 100), max_size=8))
def test_a_body_in_any_pieces_is_the_same_body(body: bytes, cuts: list[int]) -> None:
    assert read(pieces_of(body, cuts)) == read([body])


def test_the_bodies_are_read_and_refused_as_they_should() -> None:
    read_as = [read([body]) for body in BODIES]
    assert read_as[0] == {"prompt": "h\u00e9llo", "n": 2}
    assert [isinstance(found, tuple) and found[0] is InvalidField for found in read_as] == [False, False, *[True] * 4]


def received(offset: int, ids: list[int], scores: PromptScores | None = None) -> ReceivedTokens:
    return ReceivedTokens(
        ref=DECODE,
        instance="d0",
        request_id="r",
        attempt=1,
        position=PROMPT + offset,
        token_ids=ids,
        logprobs=[TokenLogprobs(-float(token)) for token in ids],
        finish="length" if offset + len(ids) == len(IDS) else "",
        error="",
        tokens_cached=0,
        from_prefill=offset == 0,
        queue_us=0,
        compute_us=0,
        scores=scores,
    )


def heard(messages: list[ReceivedTokens], stops: tuple[str, ...]) -> tuple[object, ...]:
    """Everything that the client is told in the end: text, tokens, log-probabilities, scores, how it ended."""
    sampling = SamplingParams(max_tokens=len(IDS), logprobs=0, prompt_logprobs=1)
    spec = SessionSpec(
        request_id="r",
        model="toy",
        prompt_ids=b"\1\0\0\0" * PROMPT,
        tokens_prompt=PROMPT,
        sampling=sampling,
        arrived_us=0,
    )
    session = Session(spec, CODEC.stream(stops, skip_special_tokens=True))
    decisions = session.step(1, [Submitted(1), Placed(1, Placement(prefill="p0", decode="d0"))])
    for message in messages:
        decisions += session.step(2, [message])
    emits = [decision for decision in decisions if isinstance(decision, Emit)]
    ends = [decision for decision in decisions if isinstance(decision, End)]
    return (
        "".join(emit.text for emit in emits),
        [token for emit in emits for token in emit.token_ids],
        [entry for emit in emits for entry in emit.logprobs or ()],
        [emit.scores for emit in emits if emit.scores is not None],
        ends,
    )


def in_pieces(cuts: list[int]) -> list[ReceivedTokens]:
    bounds = [0, *sorted({cut % len(IDS) for cut in cuts} - {0}), len(IDS)]
    spans = list(itertools.pairwise(bounds))
    first = 1 + cuts[0] % (PROMPT - 1) if cuts else PROMPT
    before = [received(0, [], pretended_scores(first, 1))] if cuts else []
    rest = pretended_scores(PROMPT, 1, first if cuts else 1)
    return before + [received(start, IDS[start:end], rest if start == 0 else None) for start, end in spans]


@pytest.mark.parametrize("stops", [(), ("stop",), ("END", "字 w")])
@given(st.lists(st.integers(0, 60), max_size=10), st.randoms(use_true_random=False))
def test_tokens_in_any_pieces_and_repeated_are_the_same_answer(
    stops: tuple[str, ...], cuts: list[int], rng: Any
) -> None:
    """A link that broke says again what was not acknowledged; positions make that harmless."""
    whole = heard(in_pieces([]), stops)
    messages = in_pieces(cuts)
    repeated = [*messages[: rng.randrange(len(messages) + 1)], *messages]
    assert heard(messages, stops) == whole
    assert heard(repeated, stops) == whole


def test_the_whole_answer_is_what_was_sent() -> None:
    text, ids, logprobs, scores, ends = heard(in_pieces([]), ())
    assert (text, ids, ends) == (TEXT, IDS, [End("length")])
    assert [entry.logprob for entry in logprobs] == [-float(token) for token in IDS]  # type: ignore[attr-defined]
    assert scores == [pretended_scores(PROMPT, 1)]
    assert heard(in_pieces([]), ("stop",))[0] == TEXT[: TEXT.index("stop")]
