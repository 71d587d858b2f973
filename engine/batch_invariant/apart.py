"""Sampling row by row, so that no row's arithmetic depends on how many others are sampled."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.sampling_state import SampledTokens, SamplingState


def choose_apart(
    sampling: SamplingState,
    logits: torch.Tensor,
    rows: tuple[int, ...],
    positions: torch.Tensor,
    positions_host: tuple[int, ...],
) -> SampledTokens:
    """As `SamplingState.choose`, a call for each row."""
    return joined(
        [
            sampling.choose(logits[at : at + 1], rows[at : at + 1], positions[at : at + 1], positions_host[at : at + 1])
            for at in range(len(rows))
        ]
    )


def joined(chosen: list[SampledTokens]) -> SampledTokens:
    """One record of the rows' own; alternatives are padded to the most that a row has."""
    tokens = torch.cat([one.tokens for one in chosen])
    failed = torch.cat([one.failed for one in chosen])
    reports = [(at, one, one.logprobs, one.top_values, one.top_ids) for at, one in enumerate(chosen)]
    known = [
        (at, one, logprobs, values, ids)
        for at, one, logprobs, values, ids in reports
        if logprobs is not None and values is not None and ids is not None
    ]
    if not known:
        return SampledTokens(tokens, failed)
    width = max(values.shape[1] for _, _, _, values, _ in known)
    return SampledTokens(
        tokens,
        failed,
        logprob_rows=tuple(at for at, *_ in known),
        logprob_counts=tuple(one.logprob_counts[0] for _, one, *_ in known),
        logprobs=torch.cat([logprobs for _, _, logprobs, _, _ in known]),
        top_values=torch.cat([F.pad(values, (0, width - values.shape[1])) for *_, values, _ in known]),
        top_ids=torch.cat([F.pad(ids, (0, width - ids.shape[1])) for *_, ids in known]),
    )
