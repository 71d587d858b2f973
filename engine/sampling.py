"""From logits to tokens, on the device, batched. Pure functions; which rows want what is `sampling_state`'s business.

Order, as vLLM: masks and bias, penalties, temperature, min-p, top-k, top-p, then the Gumbel-max choice with noise that
depends on (seed, position) alone, so neither the batch nor a preemption changes what a row samples.
"""

from __future__ import annotations

import numpy as np
import torch
from segue_kernels.gumbel import gumbel_noise

from engine.gumbel_cpu import gumbel_noise_cpu

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
    ordered = descending(logits)
    floor = ordered[:, :1] + torch.log(min_p)[:, None]
    kth = torch.where(top_k == 0, logits.shape[-1], top_k).clamp(max=logits.shape[-1]) - 1
    floor = torch.maximum(floor, ordered.gather(-1, kth[:, None]))
    probabilities = ordered.masked_fill(ordered < floor, NEG_INF).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    at_top_p = ordered.gather(-1, kept - 1)
    floor = torch.where(top_p[:, None] < 1.0, torch.maximum(floor, at_top_p), floor)
    return logits.masked_fill(logits < floor, NEG_INF)


def descending(values: torch.Tensor) -> torch.Tensor:
    """Rows in descending order, NaN anywhere. On a CPU by numpy: torch also orders indices, which takes 40 ms for a row
    of 49152 where the values alone take 0.5 ms."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    return -torch.from_numpy(np.sort((-values).numpy(), axis=-1))


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row from softmax(logits) by the Gumbel-max trick: int64 [rows]."""
    noise = (gumbel_noise_cpu if logits.device.type == "cpu" else gumbel_noise)(seeds, positions, logits.shape[-1])
    return noise.add_(logits).argmax(dim=-1)


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, alternatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of raw logits [rows, vocab]: log-probability of `chosen` [rows], and of the best `alternatives` with their ids
    (both [rows, alternatives])."""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(alternatives, dim=-1)
    return logprobs.gather(-1, chosen[:, None])[:, 0], best.values, best.indices
