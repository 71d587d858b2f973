"""Sampling parameters of one request, in the field's usual terms. Validated at the gateway, trusted below."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `seed` is always set below the gateway
    (an unseeded request gets one there), so that a token depends on (logits, seed, position) alone. Penalties count as
    vLLM documents: presence and frequency over generated tokens, repetition over prompt and generated tokens.
    `max_tokens` counts every generated token of the request over all its attempts. `logprobs` is the number of
    alternatives to report beside the chosen token, or None for no log-probabilities; `prompt_logprobs` the same for
    every prompt token but the first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
