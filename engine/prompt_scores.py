"""Log-probabilities of prompt tokens, for rows that ask for them: what a chunk's logits say of the tokens that follow.

A chunk of n positions has n x vocabulary logits (2048 x 151,936 in float32 are 1.2 GB), so the head runs over slices of
its positions and only the columns of the answer are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.row_state import RowState
from engine.sampling import NEG_INF
from engine.sampling_state import SamplingState
from segue.plan import Chunk, PromptScores, RowScores

LOGITS_BYTES_MAX = 64 << 20
"""Of one slice: large enough for an efficient product with the head, small beside weights and activations."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""hidden [n, hidden] -> logits float32 [n, vocab_rows]; overwritten by the caller."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The scored tokens of one chunk, the first of which stands at `position`. Tensors are on the model's device until
    `to_host`."""

    row: int
    seq: int
    position: int
    logprobs: torch.Tensor
    """float32 [n]"""
    ranks: torch.Tensor
    """int64 [n], from 1"""
    top_logprobs: torch.Tensor
    """float32 [n, alternatives]"""
    top_ids: torch.Tensor
    """int64 [n, alternatives]"""


def score_chunks(
    chunks: Sequence[Chunk], hidden: torch.Tensor, head: Head, state: RowState, sampling: SamplingState
) -> list[ScoredChunk]:
    """`hidden` [tokens, hidden] of a step whose tokens begin with those of `chunks`, in order."""
    scored, first = [], 0
    for chunk in chunks:
        alternatives, tokens_prompt = sampling.prompt_scoring(chunk.row)
        count = min(chunk.length, tokens_prompt - 1 - chunk.start)
        if alternatives is not None and count > 0:
            targets = state.tokens[chunk.row, chunk.start + 1 : chunk.start + 1 + count]
            columns = score(head, hidden[first : first + count], targets, alternatives, sampling)
            scored.append(ScoredChunk(chunk.row, state.seq(chunk.row), chunk.start + 1, *columns))
        first += chunk.length
    return scored


def score(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, alternatives: int, sampling: SamplingState
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and ranks of `targets` int64 [n], and the best `alternatives` of each with their ids, from
    hidden [n, hidden] of the positions before them."""
    size = max(LOGITS_BYTES_MAX // (4 * sampling.vocab_rows), 1)
    slices = []
    for start in range(0, len(targets), size):
        logits = head(hidden[start : start + size])
        logits[:, sampling.vocab_size :] = NEG_INF
        slices.append(_columns(logits, targets[start : start + size], alternatives))
    logprobs, ranks, top_logprobs, top_ids = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return logprobs, ranks, top_logprobs, top_ids


def _columns(logits: torch.Tensor, targets: torch.Tensor, alternatives: int) -> tuple[torch.Tensor, ...]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])
    best = logprobs.topk(alternatives, dim=-1)
    return chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, best.values, best.indices


def to_host(scored: ScoredChunk) -> ScoredChunk:
    """Start copies into pinned memory (GPU); on a CPU the tensors are there already."""
    if scored.logprobs.device.type == "cpu":
        return scored

    def host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    columns = (scored.logprobs, scored.ranks, scored.top_logprobs, scored.top_ids)
    return ScoredChunk(scored.row, scored.seq, scored.position, *map(host, columns))


def row_scores(scored: ScoredChunk) -> RowScores:
    """For the planner, once the tensors have arrived on the host."""
    scores = PromptScores(
        position=scored.position,
        alternatives=scored.top_ids.shape[1],
        logprobs=scored.logprobs.tolist(),
        ranks=scored.ranks.tolist(),
        top_ids=scored.top_ids.flatten().tolist(),
        top_logprobs=scored.top_logprobs.flatten().tolist(),
    )
    return RowScores(scored.row, scored.seq, scores)
