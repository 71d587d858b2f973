"""Choose one token per row: greedy, or at a temperature by the Gumbel-max trick, and advance the row.

    score_v = logit_v                                   temperature 0
    score_v = logit_v / temperature + noise_v           noise of `segue_kernels.gumbel`, keyed by (seed, position, v)
    token   = argmax_v score_v, the lowest v among equals; v runs over real tokens only, padded rows are never chosen

Two kernels: `partial_argmax` reduces one slice of the vocabulary per program, `finish` combines the slices of a row.
Row state is indexed by row, logits by place in the batch; `rows` int32 [batch] maps one to the other (-1: padding,
nothing is written but its result, -1). `finish` writes the token, moves the row's position on by one, and puts the
token, or -1 where a logit was NaN, into `results` int32 [batch].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.gumbel import gumbel_noise
from segue_kernels.programmatic_launch import launch_options

SLICE = 1024
"""Vocabulary entries per program and step of its loop."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Views of what is kept per row [rows_max]: the newest token and where it stands, and how to sample the next."""

    tokens: torch.Tensor
    """int32"""
    positions: torch.Tensor
    """int32; the sampled token will stand at position + 1."""
    temperatures: torch.Tensor
    """float32; 0 is greedy."""
    seeds: torch.Tensor
    """int32 [rows_max, 2]: low and high word of the 64-bit seed."""


@triton.jit
def mix(x):
    """Murmur3's 32-bit finaliser on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed_low, seed_high, position, index):
    """`gumbel_noise` of one (seed, position) at vocabulary indices `index`; every word uint32."""
    row = mix(mix(mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ position)
    word = mix(mix(row + index * 0x9E3779B1) ^ row)
    uniform = ((word >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def better(value, index, other_value, other_index):
    """The larger value; among equals the lower index."""
    take = (other_value > value) | ((other_value == value) & (other_index < index))
    return tl.where(take, other_value, value), tl.where(take, other_index, index)


@triton.jit
def partial_argmax_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    values_ptr,
    indices_ptr,
    invalid_ptr,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
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
        temperature = tl.load(temperatures_ptr + row)
        low = tl.load(seeds_ptr + 2 * row).to(tl.uint32, bitcast=True)
        high = tl.load(seeds_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
        position = (tl.load(positions_ptr + row) + 1).to(tl.uint32, bitcast=True)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_index = tl.full([BLOCK], 2147483647, tl.int32)
        invalid = tl.zeros([BLOCK], tl.int32)
        for step in range(STEPS):
            index = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            inside = index < vocab_size
            source = logits_ptr + place.to(tl.int64) * logits_stride + index
            score = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
            invalid |= (score != score).to(tl.int32)
            if temperature > 0:
                noise = gumbel(low, high, position, index.to(tl.uint32))
                score = tl.div_rn(score, temperature) + noise
            best, best_index = better(best, best_index, score, tl.where(inside, index, 2147483647))
        value, index = tl.reduce((best, best_index), 0, better)
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
        _, index = tl.reduce((values, indices), 0, better)
        token = tl.where(tl.max(invalid, axis=0) > 0, -1, index)
        tl.store(tokens_ptr + row, tl.maximum(token, 0))
        tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
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
    rows: torch.Tensor,
    state: RowState,
    results: torch.Tensor,
    scratch: SampleScratch,
    vocab_size: int,
    *,
    pdl: bool = False,
) -> None:
    """Sample for `rows` [batch] from `logits` [batch, >= vocab_size] (float32 or bfloat16); see the module."""
    batch = rows.shape[0]
    if batch == 0:
        return
    steps = 1 if batch < 8 else 4
    parts = triton.cdiv(vocab_size, SLICE * steps)
    options = launch_options(pdl)
    partial_argmax_kernel[(batch, parts)](
        logits,
        rows,
        state.positions,
        state.temperatures,
        state.seeds,
        scratch.values,
        scratch.indices,
        scratch.invalid,
        vocab_size,
        logits.stride(0),
        BLOCK=SLICE,
        STEPS=steps,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    finish_kernel[(batch,)](
        scratch.values,
        scratch.indices,
        scratch.invalid,
        rows,
        state.tokens,
        state.positions,
        results,
        parts,
        BLOCK=triton.next_power_of_2(parts),
        PDL=pdl,
        num_warps=1,
        **options,
    )


def sample_reference(
    logits: torch.Tensor, rows: torch.Tensor, state: RowState, results: torch.Tensor, vocab_size: int
) -> None:
    """The eager twin of `sample`: same effect on `state` and `results`."""
    live = rows >= 0
    at = rows[live].long()
    scores = logits[live, :vocab_size].float()
    invalid = scores.isnan().any(-1)
    temperatures = state.temperatures[at][:, None]
    words = state.seeds[at].long() & 0xFFFFFFFF
    noise = gumbel_noise(words[:, 0] | (words[:, 1] << 32), state.positions[at].long() + 1, vocab_size)
    scores = torch.where(temperatures > 0, scores / temperatures.clamp(min=1e-30) + noise, scores)
    tokens = scores.nan_to_num(nan=float("-inf")).argmax(-1).int()
    state.tokens[at] = tokens.masked_fill(invalid, 0)
    state.positions[at] += 1
    results.fill_(-1)
    results[live] = tokens.masked_fill(invalid, -1)
