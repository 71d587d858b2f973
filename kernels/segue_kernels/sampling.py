"""Choose one token per row: greedy, or at a temperature by the Gumbel-max trick, and advance the row.

    score_v = logit_v                                   temperature 0
    score_v = logit_v / temperature + noise_v           noise of `segue_kernels.gumbel`, keyed by (seed, position, v)
    token   = argmax_v score_v, the lowest v among equals; v runs over real tokens only, padded rows are never chosen

Two kernels: `partial_argmax` reduces one slice of the vocabulary per program, `finish` combines the slices of a place.
`finish` appends the token to its row of the token table, moves the place's position on by one, and puts the token into
`results` int32 [batch]: -1 for padding, which touches nothing else, and where the best logit was not finite or any was
NaN (the row's token is then 0, so that a step that is already queued behind still reads a valid id).

Rows with penalties, biases, filters or log-probabilities are served between the two by `general_sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.decode_state import Places
from segue_kernels.general_sampling import GeneralSampling, choose_general
from segue_kernels.gumbel import gumbel_noise
from segue_kernels.noise import approximate_gumbel, better, first_best, gumbel, noise_row
from segue_kernels.programmatic_launch import launch_options
from segue_kernels.slices import SLICE, slices_each


@triton.jit
def partial_argmax_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    table_ptr,
    values_ptr,
    indices_ptr,
    invalid_ptr,
    vocab_size,
    logits_stride,
    seeds_stride,
    table_stride,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_ptr + place)
    if row >= 0:
        general = 0
        if HAS_TABLE:
            general = tl.load(table_ptr + row.to(tl.int64) * table_stride)
        temperature = tl.load(temperatures_ptr + place)
        low = tl.load(seeds_ptr + place).to(tl.uint32, bitcast=True)
        high = tl.load(seeds_ptr + seeds_stride + place).to(tl.uint32, bitcast=True)
        position = (tl.load(positions_ptr + place) + 1).to(tl.uint32, bitcast=True)
        word = noise_row(low, high, position)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_index = tl.full([BLOCK], 2147483647, tl.int32)
        invalid = tl.zeros([BLOCK], tl.int32)
        # Rows of the general sampler leave nothing here: it puts its choice into the first part.
        for step in range(tl.where(general == 0, STEPS, 0)):
            index = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            inside = index < vocab_size
            source = logits_ptr + place.to(tl.int64) * logits_stride + index
            score = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
            invalid |= (score != score).to(tl.int32)
            id_or_none = tl.where(inside, index, 2147483647)
            if temperature > 0:
                score = tl.div_rn(score, temperature)
                highest = tl.max(best, 0)
                rough = tl.max(score + approximate_gumbel(word, index.to(tl.uint32)), 0)
                # Exact noise, five times as dear, only where it can win.
                if rough + 0.01 >= highest - tl.abs(highest) * 1e-6:
                    score += gumbel(word, index.to(tl.uint32))
                    best, best_index = better(best, best_index, score, id_or_none)
            else:
                best, best_index = better(best, best_index, score, id_or_none)
        value, index = first_best(best, best_index)
        tl.store(values_ptr + place * parts + part, value)
        tl.store(indices_ptr + place * parts + part, index)
        tl.store(invalid_ptr + place * parts + part, tl.max(invalid, axis=0))


@triton.jit
def finish_kernel(
    values_ptr,
    indices_ptr,
    invalid_ptr,
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    results_ptr,
    parts,
    tokens_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_ptr + place)
    token = -1
    if row >= 0:
        part = tl.arange(0, BLOCK)
        inside = part < parts
        values = tl.load(values_ptr + place * parts + part, mask=inside, other=float("-inf"))
        indices = tl.load(indices_ptr + place * parts + part, mask=inside, other=2147483647)
        invalid = tl.load(invalid_ptr + place * parts + part, mask=inside, other=0)
        value, index = first_best(values, indices)
        failed = (tl.max(invalid, axis=0) > 0) | (tl.abs(value) == float("inf"))
        token = tl.where(failed, -1, index)
        position = tl.load(positions_ptr + place) + 1
        tl.store(tokens_ptr + row.to(tl.int64) * tokens_stride + position, tl.maximum(token, 0).to(tl.int64))
        tl.store(positions_ptr + place, position)
    tl.store(results_ptr + place, token)


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Per-slice results between the two kernels, for up to `batch` rows."""

    values: torch.Tensor
    indices: torch.Tensor
    invalid: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, vocab_size: int, device: torch.device) -> SampleScratch:
        size = batch * triton.cdiv(vocab_size, SLICE)
        return cls(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
        )


def sample(
    logits: torch.Tensor,
    places: Places,
    tokens: torch.Tensor,
    results: torch.Tensor,
    scratch: SampleScratch,
    vocab_size: int,
    *,
    general: GeneralSampling | None = None,
    pdl: bool = False,
) -> None:
    """Sample for every place from `logits` [batch, >= vocab_size] (float32 or bfloat16) into the token table `tokens`
    int64 [rows, positions_max]; see the module. Without `general` every row is taken for a plain one."""
    batch = places.rows.shape[0]
    steps = slices_each(batch, vocab_size)
    parts = triton.cdiv(vocab_size, SLICE * steps)
    options = launch_options(pdl)
    partial_argmax_kernel[(batch, parts)](
        logits,
        places.rows,
        places.positions,
        places.temperatures,
        places.seeds,
        places.rows if general is None else general.table.words,
        scratch.values,
        scratch.indices,
        scratch.invalid,
        vocab_size,
        logits.stride(0),
        places.seeds.stride(0),
        0 if general is None else general.table.words.stride(0),
        BLOCK=SLICE,
        STEPS=steps,
        HAS_TABLE=general is not None,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    if general is not None:
        first_parts = (scratch.values, scratch.indices, scratch.invalid)
        choose_general(logits, places, general, first_parts, parts, vocab_size, pdl=pdl)
    finish_kernel[(batch,)](
        scratch.values,
        scratch.indices,
        scratch.invalid,
        places.rows,
        tokens,
        places.positions,
        results,
        parts,
        tokens.stride(0),
        BLOCK=triton.next_power_of_2(parts),
        PDL=pdl,
        num_warps=1,
        **options,
    )


def sample_reference(
    logits: torch.Tensor, places: Places, tokens: torch.Tensor, results: torch.Tensor, vocab_size: int
) -> None:
    """The eager twin of `sample`: same effect on `places`, `tokens` and `results`."""
    live = places.rows >= 0
    scores = logits[live, :vocab_size].float()
    temperatures = places.temperatures[live][:, None]
    low, high = places.seeds[:, live].long() & 0xFFFFFFFF
    noise = gumbel_noise(low | (high << 32), places.positions[live].long() + 1, vocab_size)
    failed = ~torch.isfinite(scores.amax(-1))
    scores = torch.where(temperatures > 0, scores / temperatures.clamp(min=1e-30) + noise, scores)
    chosen = scores.nan_to_num(nan=float("-inf")).argmax(-1)
    places.positions[live] += 1
    tokens[places.rows[live].long(), places.positions[live].long()] = chosen.masked_fill(failed, 0)
    results.fill_(-1)
    results[live] = chosen.int().masked_fill(failed, -1)
