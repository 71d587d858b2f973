"""First pass of general sampling: from logits to scores, and what later passes need to skip most of them.

For every place whose row has wishes (`row_sampling`), in this order and in float32 without fused multiply-adds, as the
CPU's sampler:

    x += bias                              of the row's biased tokens
    x  = -inf                              of its stops, at positions below STOPS_UNTIL
    x  = x / r  if x > 0 else  x * r       r = repetition for tokens in prompt or output, else 1
    x  = x - frequency * count - presence * (count > 0)        count: occurrences in the output
    x  = x / temperature                   unless 0

Scores go to `scores` [places, vocab]. Of every GROUP neighbouring tokens the largest score and its group's mass
sum(exp(x - largest)) are kept; of rows that report log-probabilities also the largest raw logit, and per program the
log-sum-exp of raw logits. Floor: logits read and scores written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels import row_sampling

GROUP = 64
"""Tokens of a group: 128,256 tokens make 2,004 groups, which one program holds in registers."""

_GROUP = tl.constexpr(GROUP)
_UNTIL, _STOPS, _BIASES = (
    tl.constexpr(word) for word in (row_sampling.STOPS_UNTIL, row_sampling.STOPS, row_sampling.BIASES)
)
_PRESENCE, _FREQUENCY, _REPETITION = (
    tl.constexpr(word) for word in (row_sampling.PRESENCE, row_sampling.FREQUENCY, row_sampling.REPETITION)
)
_STOPS_AT, _BIASES_AT = tl.constexpr(row_sampling.STOPS_AT), tl.constexpr(row_sampling.BIASES_AT)
_STOPS_MAX, _BIASES_MAX = tl.constexpr(row_sampling.STOPS_MAX), tl.constexpr(row_sampling.BIASES_MAX)
_PENALISED, _REPORTED = tl.constexpr(row_sampling.PENALISED), tl.constexpr(row_sampling.REPORTED)


@triton.jit
def float_word(row_words, at):
    return tl.load(row_words + at).to(tl.float32, bitcast=True)


@triton.jit
def with_entries(x, index, first, entries, count, LIST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add to x [BLOCK], which holds tokens `first` .., the entries of a sorted list: pairs (token, float) with WIDTH 2,
    tokens that get -inf with WIDTH 1."""
    lane = tl.arange(0, LIST)
    ids = tl.load(entries + lane * WIDTH, mask=lane < count, other=-1)
    begin = tl.sum(((ids >= 0) & (ids < first)).to(tl.int32), 0)
    end = begin + tl.sum(((ids >= first) & (ids < first + BLOCK)).to(tl.int32), 0)
    for entry in range(begin, end):
        token = tl.load(entries + entry * WIDTH)
        value = float("-inf")
        if WIDTH == 2:
            value = float_word(entries, entry * WIDTH + 1)
        x = tl.where(index == token, x + value, x)
    return x


@triton.jit
def penalised(x, index, inside, row_words, generated_ptr, in_prompt_ptr):
    count = tl.load(generated_ptr + index, mask=inside, other=0)
    in_prompt = tl.load(in_prompt_ptr + index, mask=inside, other=0).to(tl.int1)
    appeared = count > 0
    factor = tl.where(appeared | in_prompt, float_word(row_words, _REPETITION), 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = x - float_word(row_words, _FREQUENCY) * count.to(tl.float32)
    return x - float_word(row_words, _PRESENCE) * appeared.to(tl.float32)


@triton.jit
def shape_logits_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperatures_ptr,
    table_ptr,
    generated_ptr,
    in_prompt_ptr,
    scores_ptr,
    peaks_ptr,
    masses_ptr,
    raw_peaks_ptr,
    invalid_ptr,
    raw_max_ptr,
    raw_sum_ptr,
    vocab_size,
    groups,
    logits_stride,
    table_stride,
    counts_stride,
    scores_stride,
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
    row = tl.load(rows_ptr + place).to(tl.int64)
    row_words = table_ptr + tl.maximum(row, 0) * table_stride
    flags = tl.load(row_words, mask=row >= 0, other=0)
    if flags != 0:
        temperature = tl.load(temperatures_ptr + place)
        stops = tl.load(row_words + _STOPS)
        stops = tl.where(tl.load(positions_ptr + place) + 1 < tl.load(row_words + _UNTIL), stops, 0)
        biases = tl.load(row_words + _BIASES)
        invalid = tl.zeros([BLOCK], tl.int32)
        raw_max = tl.full([BLOCK], float("-inf"), tl.float32)
        raw_sum = tl.zeros([BLOCK], tl.float32)
        lane = tl.arange(0, BLOCK)
        group_lane = tl.arange(0, BLOCK // _GROUP)
        for step in range(STEPS):
            first = (part * STEPS + step) * BLOCK
            index = first + lane
            inside = index < vocab_size
            x = tl.load(logits_ptr + place.to(tl.int64) * logits_stride + index, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            invalid |= ((x != x) | (x == float("inf"))).to(tl.int32)
            group = first // _GROUP + group_lane
            group_at = place.to(tl.int64) * groups + group
            if (flags & _REPORTED) != 0:
                tl.store(
                    raw_peaks_ptr + group_at,
                    tl.max(tl.reshape(x, [BLOCK // _GROUP, _GROUP]), 1),
                    mask=group < groups,
                )
                higher = tl.maximum(raw_max, x)
                shift = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
                raw_sum = raw_sum * tl.exp(raw_max - shift) + tl.exp(x - shift)
                raw_max = higher
            if biases > 0:
                x = with_entries(x, index, first, row_words + _BIASES_AT, biases, _BIASES_MAX, 2, BLOCK)
            if stops > 0:
                x = with_entries(x, index, first, row_words + _STOPS_AT, stops, _STOPS_MAX, 1, BLOCK)
            if (flags & _PENALISED) != 0:
                counts = row * counts_stride
                x = penalised(
                    x,
                    index,
                    inside,
                    row_words,
                    generated_ptr + counts,
                    in_prompt_ptr + counts,
                )
            if temperature > 0:
                x = tl.div_rn(x, temperature)
            tl.store(scores_ptr + place.to(tl.int64) * scores_stride + index, x, mask=inside)
            by_group = tl.reshape(x, [BLOCK // _GROUP, _GROUP])
            peak = tl.max(by_group, 1)
            shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
            tl.store(peaks_ptr + group_at, peak, mask=group < groups)
            tl.store(masses_ptr + group_at, tl.sum(tl.exp(by_group - shift[:, None]), 1), mask=group < groups)
        at = place * parts + part
        tl.store(invalid_ptr + at, tl.max(invalid, 0))
        if (flags & _REPORTED) != 0:
            peak = tl.max(raw_max, 0)
            shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
            tl.store(raw_max_ptr + at, peak)
            tl.store(raw_sum_ptr + at, tl.sum(raw_sum * tl.exp(raw_max - shift), 0))
