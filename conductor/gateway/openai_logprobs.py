"""Log-probabilities in the two shapes of OpenAI's API, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conductor.gateway.text import TextCodec
from segue.plan import PromptScores, TokenLogprobs

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
    codec: TextCodec, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
) -> tuple[dict[str, Any], int]:
    """The legacy object, and the text offset after these tokens. `offset` counts characters of tokens shown alone. None
    stands for what nothing is known of: a prompt's first token."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = codec.token_text(token_id)
        tokens.append(text)
        values.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else _legacy_top(codec, text, entry))
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _legacy_top(codec: TextCodec, text: str, entry: TokenLogprobs) -> dict[str, float]:
    top = {codec.token_text(other): _finite(logprob) for other, logprob in entry.top}
    return {**top, text: _finite(entry.logprob)}


def scored_tokens(scores: PromptScores, alternatives: int) -> list[TokenLogprobs | None]:
    """One entry for each prompt token, the first of which has none; at most `alternatives` others for each."""
    entries: list[TokenLogprobs | None] = [None]
    for index, logprob in enumerate(scores.logprobs):
        start = index * scores.alternatives
        end = start + min(alternatives, scores.alternatives)
        top = list(zip(scores.top_ids[start:end], scores.top_logprobs[start:end], strict=True))
        entries.append(TokenLogprobs(logprob, top))
    return entries


def prompt_logprobs(
    codec: TextCodec, token_ids: Sequence[int], scores: PromptScores, alternatives: int
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token an object by token id, the token itself first; null for the first token."""
    entries = scored_tokens(scores, alternatives)
    objects: list[dict[str, Any] | None] = [None]
    for token_id, entry, rank in zip(token_ids[1:], entries[1:], scores.ranks, strict=True):
        assert entry is not None, "only the first token has no entry"
        found = {str(token_id): _vllm_entry(codec, token_id, entry.logprob, rank)}
        for place, (other, logprob) in enumerate(entry.top, 1):
            found.setdefault(str(other), _vllm_entry(codec, other, logprob, place))
        objects.append(found)
    return objects


def _vllm_entry(codec: TextCodec, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": codec.token_text(token_id)}


def _chat_entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    data = codec.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_LEAST)
