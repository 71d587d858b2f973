"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conductor.gateway.text import TextCodec
from segue.plan import TokenLogprobs

LOGPROB_LEAST = -9999.0
"""JSON has no infinities; OpenAI reports this for what is impossible."""


def chat_logprobs(codec: TextCodec, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(codec, token_id, entry.logprob),
                "top_logprobs": [_chat_entry(codec, other, logprob) for other, logprob in entry.top],
            }
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    codec: TextCodec, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """The legacy object, and the text offset after these tokens. `offset` counts characters of tokens shown alone."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = codec.token_text(token_id)
        tokens.append(text)
        values.append(_finite(entry.logprob))
        top = {codec.token_text(other): _finite(logprob) for other, logprob in entry.top}
        tops.append({**top, text: _finite(entry.logprob)})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _chat_entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    data = codec.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_LEAST)
