"""Sampling of rows with penalties, biases, banned stops, filters or log-probabilities, beside plain rows of one batch.

Three kernels, each of which leaves plain rows and padding at once, so that they stand in every captured step:
`shape_logits_kernel` (scores, one pass over the logits), `choose_kernel` (the token), `report_kernel` (what OpenAI's
`logprobs` asks for).
Nothing is read back. The CPU's sampler, `general_reference` and this give the same token for the same logits, seed and
position, but for a sum of probabilities that is within rounding of top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton import knobs

from segue_kernels.decode_state import Places
from segue_kernels.general_choice import choose_kernel
from segue_kernels.gumbel import gumbel_noise
from segue_kernels.logprob_report import REPORT_WORDS, report_kernel
from segue_kernels.programmatic_launch import launch_options
from segue_kernels.row_sampling import RowTable, RowWish
from segue_kernels.shaped_logits import GROUP, shape_logits_kernel
from segue_kernels.slices import slices_each

BLOCK = 1024
LIST_MAX = 16_384
"""Candidates of one row; a row with more of them is searched as a whole."""


@dataclass(frozen=True, slots=True)
class GeneralScratch:
    """What the kernels hand on, for up to `places` places; one step uses it at a time."""

    scores: torch.Tensor
    """float32 [places, vocab]"""
    peaks: torch.Tensor
    masses: torch.Tensor
    raw_peaks: torch.Tensor
    """float32 [places, groups]"""
    invalid: torch.Tensor
    raw_max: torch.Tensor
    raw_sum: torch.Tensor
    """int32 and float32 [places * parts]"""
    groups: torch.Tensor
    """int32 [places, groups]"""
    values: torch.Tensor
    indices: torch.Tensor
    """float32 and int32 [places, LIST_MAX]"""

    @classmethod
    def allocate(cls, places: int, vocab_size: int, device: torch.device) -> GeneralScratch:
        groups, parts = triton.cdiv(vocab_size, GROUP), triton.cdiv(vocab_size, BLOCK)

        def empty(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(places, width, dtype=dtype, device=device)

        return cls(
            scores=empty(vocab_size),
            peaks=empty(groups),
            masses=empty(groups),
            raw_peaks=empty(groups),
            invalid=empty(parts, torch.int32),
            raw_max=empty(parts),
            raw_sum=empty(parts),
            groups=empty(groups, torch.int32),
            values=empty(LIST_MAX),
            indices=empty(LIST_MAX, torch.int32),
        )


@dataclass(frozen=True, slots=True)
class GeneralSampling:
    table: RowTable
    scratch: GeneralScratch
    reports: torch.Tensor
    """float32 [places, REPORT_WORDS] of `logprob_report`, for places whose rows ask"""

    @classmethod
    def allocate(cls, table: RowTable, places: int, vocab_size: int) -> GeneralSampling:
        device = table.words.device
        reports = torch.zeros(places, REPORT_WORDS, device=device)
        return cls(table, GeneralScratch.allocate(places, vocab_size, device), reports)


def choose_general(
    logits: torch.Tensor,
    places: Places,
    general: GeneralSampling,
    first_parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parts_apart: int,
    vocab_size: int,
    *,
    pdl: bool,
) -> None:
    """Put the choice of each place with wishes into `first_parts` (value 0, token, whether it failed) at place *
    `parts_apart`, add it to the row's counts where it has penalties, and report log-probabilities."""
    batch, table, scratch = places.rows.shape[0], general.table, general.scratch
    steps = slices_each(batch, vocab_size)
    groups, parts = triton.cdiv(vocab_size, GROUP), triton.cdiv(vocab_size, BLOCK * steps)
    groups_block, parts_block = triton.next_power_of_2(groups), triton.next_power_of_2(parts)
    options = launch_options(pdl)
    # Separate roundings, as everywhere else; the interpreter has no fused multiply-add to switch off.
    unfused = {} if knobs.runtime.interpret else {"enable_fp_fusion": False}
    shape_logits_kernel[(batch, parts)](
        logits,
        places.rows,
        places.positions,
        places.temperatures,
        table.words,
        table.generated,
        table.in_prompt,
        scratch.scores,
        scratch.peaks,
        scratch.masses,
        scratch.raw_peaks,
        scratch.invalid,
        scratch.raw_max,
        scratch.raw_sum,
        vocab_size,
        groups,
        logits.stride(0),
        table.words.stride(0),
        table.generated.stride(0),
        scratch.scores.stride(0),
        BLOCK=BLOCK,
        STEPS=steps,
        PDL=pdl,
        num_warps=8,
        **unfused,
        **options,
    )
    values, indices, invalid = first_parts
    choose_kernel[(batch,)](
        places.rows,
        places.positions,
        places.temperatures,
        places.seeds,
        table.words,
        table.generated,
        scratch.scores,
        scratch.peaks,
        scratch.masses,
        scratch.invalid,
        scratch.groups,
        scratch.values,
        scratch.indices,
        values,
        indices,
        invalid,
        vocab_size,
        groups,
        parts,
        parts_apart,
        places.seeds.stride(0),
        table.words.stride(0),
        table.generated.stride(0),
        scratch.scores.stride(0),
        LIST_MAX=LIST_MAX,
        GROUPS_BLOCK=groups_block,
        PARTS_BLOCK=parts_block,
        # Few rows leave multiprocessors to spare, many share them by two.
        TILE=2048 if batch > 128 else 4096,
        PDL=pdl,
        num_warps=8 if batch > 128 else 16,
        **options,
    )
    report_kernel[(batch,)](
        logits,
        places.rows,
        table.words,
        scratch.raw_peaks,
        scratch.raw_max,
        scratch.raw_sum,
        indices,
        general.reports,
        vocab_size,
        groups,
        parts,
        parts_apart,
        logits.stride(0),
        table.words.stride(0),
        GROUPS_BLOCK=groups_block,
        PARTS_BLOCK=parts_block,
        PDL=pdl,
        num_warps=4,
        **options,
    )


def general_reference(
    logits: torch.Tensor,
    wish: RowWish,
    generated: torch.Tensor,
    in_prompt: torch.Tensor,
    temperature: float,
    seed: int,
    position: int,
) -> tuple[int, torch.Tensor]:
    """The eager twin for one row, by sorting: its token, and its scores float32 [vocab]. logits float32 [vocab],
    generated int32 and in_prompt bool [vocab], `position` where the token will stand."""
    x = logits.clone()
    for token, value in wish.biases:
        x[token] += value
    if position < wish.stops_until:
        x[list(wish.stops)] = float("-inf")
    factor = torch.where((generated > 0) | in_prompt, wish.repetition, 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    x = x - wish.frequency * generated - wish.presence * (generated > 0)
    if temperature == 0:
        return int(x.argmax()), x
    x = x / torch.tensor(temperature, dtype=torch.float32, device=x.device)
    ordered = x.sort(descending=True).values
    floor = ordered[0] + wish.log_min_p
    if 0 < wish.top_k < x.shape[0]:
        floor = torch.maximum(floor, ordered[wish.top_k - 1])
    mass = torch.where(x >= floor, (x - ordered[0]).double().exp(), 0.0)
    kept = x >= floor
    if wish.top_p < 1.0:
        by_score, order = x.sort(descending=True)
        running = mass[order].cumsum(0)
        first_equal = torch.searchsorted(-by_score, -x)
        above = torch.where(first_equal > 0, running[(first_equal - 1).clamp(min=0)], 0.0)
        kept &= above < wish.top_p * mass.sum()
    bits = seed & 0xFFFFFFFFFFFFFFFF
    signed = bits - (1 << 64) if bits >= 1 << 63 else bits
    noise = gumbel_noise(torch.tensor([signed]), torch.tensor([position]), x.shape[0])[0].to(x.device)
    return int(torch.where(kept, x + noise, float("-inf")).argmax()), x
