"""What a call wants to hear of its own prompts: their text before the answer, and their tokens' log-probabilities."""

from __future__ import annotations

import msgspec

from conductor.gateway.openai_fields import ChatRequest, CompletionRequest
from conductor.gateway.request_fields import CheckedRequest, unpack_token_ids
from conductor.gateway.text import TextCodec


class PromptsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """`texts` and `token_ids` have one entry for each prompt, where `echo` or log-probabilities need them."""

    echo: bool = False
    echo_logprobs: int | None = None
    """Alternatives of echoed tokens; None: the echo is text alone."""
    prompt_logprobs: int | None = None
    """Alternatives in vLLM's `prompt_logprobs`; None: not asked for."""
    texts: list[str] = []
    token_ids: list[list[int]] = []


def asked_by_chat(request: ChatRequest, prompt: CheckedRequest) -> PromptsAsked:
    if request.prompt_logprobs is None:
        return PromptsAsked()
    return PromptsAsked(prompt_logprobs=request.prompt_logprobs, token_ids=[unpack_token_ids(prompt.prompt_ids)])


def asked_by_completion(
    request: CompletionRequest, given: list[str | list[int]], prompts: list[CheckedRequest], codec: TextCodec
) -> PromptsAsked:
    """An echoed text is the one that was given; of token ids it is what they decode to."""
    if not request.echo and request.prompt_logprobs is None:
        return PromptsAsked()
    texts = [
        prompt if isinstance(prompt, str) else codec.decode(prompt, skip_special_tokens=checked.skip_special_tokens)
        for prompt, checked in zip(given, prompts, strict=True)
    ]
    return PromptsAsked(
        echo=bool(request.echo),
        echo_logprobs=request.logprobs if request.echo else None,
        prompt_logprobs=request.prompt_logprobs,
        texts=texts if request.echo else [],
        token_ids=[unpack_token_ids(prompt.prompt_ids) for prompt in prompts],
    )
