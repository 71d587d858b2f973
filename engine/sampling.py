"""From logits to tokens, on the device, batched. Pure functions; which rows want what is `sampling_state`'s business.

Order, as vLLM: masks and bias, penalties, temperature, min-p, top-k, top-p, then the Gumbel-max choice with noise that
depends on (seed, position) alone, so neither the batch nor a preemption changes what a row samples.
"""

from __future__ import annotations

import torch
from segue_kernels.gumbel import gumbel_noise

NEG_INF = float("-inf")


def apply_penalties(
    logits: torch.Tensor,
    generated: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """logits [rows, vocab], generated int32 counts and in_prompt bool of the same shape, penalties float32 [rows].

    Repetition divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019);
    frequency subtracts per occurrence and presence once, for generated tokens."""
    appeared = generated > 0
    factor = torch.where(appeared | in_prompt, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * generated - presence[:, None] * appeared


def apply_filters(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside each row's filters to -inf. logits float32 [rows, vocab] after temperature; top_k int64 (0:
    off), top_p (1: off), min_p (0: off), all [rows]. Ties at a boundary are all kept."""
    floor = logits.amax(dim=-1, keepdim=True) + torch.log(min_p)[:, None]
    logits = logits.masked_fill(logits < floor, NEG_INF)
    ordered, order = logits.sort(dim=-1, descending=True)
    vocab = logits.shape[-1]
    kth = torch.where(top_k == 0, vocab, top_k).clamp(max=vocab) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, kth[:, None]), NEG_INF)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, NEG_INF)
    return torch.empty_like(logits).scatter_(-1, order, kept)


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row from softmax(logits) by the Gumbel-max trick: int64 [rows]."""
    noisy: torch.Tensor = logits + gumbel_noise(seeds, positions, logits.shape[-1])
    return noisy.argmax(dim=-1)


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, alternatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of raw logits [rows, vocab]: log-probability of `chosen` [rows], and of the best `alternatives` with their ids
    (both [rows, alternatives])."""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(alternatives, dim=-1)
    return logprobs.gather(-1, chosen[:, None])[:, 0], best.values, best.indices
