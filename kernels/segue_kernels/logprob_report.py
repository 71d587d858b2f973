"""Log-probabilities of raw logits: of the chosen token, and of the best alternatives with their ids.

One program serves one place whose row reports them. The best alternatives are taken one by one: the group with the
largest peak holds the next, and its peak becomes the largest of its tokens that come after in the order (logit
descending, token ascending). Reads GROUP logits for each alternative, whatever the vocabulary.

Report of a place, float32 [1 + 2 * ALTERNATIVES_MAX]: the token's log-probability, the alternatives', then their ids as
the bits of int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels import row_sampling
from segue_kernels.shaped_logits import GROUP

REPORT_WORDS = 1 + 2 * row_sampling.ALTERNATIVES_MAX

_GROUP = tl.constexpr(GROUP)
_LOGPROBS, _REPORTED = tl.constexpr(row_sampling.LOGPROBS), tl.constexpr(row_sampling.REPORTED)
_ALTERNATIVES_MAX = tl.constexpr(row_sampling.ALTERNATIVES_MAX)
_REPORT_WORDS = tl.constexpr(REPORT_WORDS)


@triton.jit
def report_kernel(
    logits_ptr,
    rows_ptr,
    table_ptr,
    raw_peaks_ptr,
    raw_max_ptr,
    raw_sum_ptr,
    chosen_index_ptr,
    report_ptr,
    vocab_size,
    groups,
    parts,
    chosen_stride,
    logits_stride,
    table_stride,
    GROUPS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_ptr + place).to(tl.int64)
    row_words = table_ptr + tl.maximum(row, 0) * table_stride
    flags = tl.load(row_words, mask=row >= 0, other=0)
    if (flags & _REPORTED) != 0:
        logits = logits_ptr + place.to(tl.int64) * logits_stride
        report = report_ptr + place * _REPORT_WORDS
        part = tl.arange(0, PARTS_BLOCK)
        part_at = place * parts + part
        highs = tl.load(raw_max_ptr + part_at, mask=part < parts, other=float("-inf"))
        sums = tl.load(raw_sum_ptr + part_at, mask=part < parts, other=0.0)
        largest = tl.max(highs, 0)
        log_sum = largest + tl.log(tl.sum(sums * tl.exp(highs - largest), 0))
        token = tl.load(chosen_index_ptr + place * chosen_stride)
        tl.store(report, tl.load(logits + token).to(tl.float32) - log_sum)
        group = tl.arange(0, GROUPS_BLOCK)
        peak_at = place.to(tl.int64) * groups + group
        peaks = tl.load(raw_peaks_ptr + peak_at, mask=group < groups, other=float("-inf"))
        after = tl.full([GROUPS_BLOCK], -1, tl.int32)
        lane = tl.arange(0, _GROUP)
        for alternative in range(tl.load(row_words + _LOGPROBS)):
            peak = tl.max(peaks, 0)
            first = tl.min(tl.where(peaks == peak, group, 2147483647), 0)
            seen = tl.max(tl.where(group == first, after, -1), 0)
            index = first * _GROUP + lane
            x = tl.load(logits + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
            best = tl.min(tl.where((x == peak) & (index > seen), index, 2147483647), 0)
            tl.store(report + 1 + alternative, peak - log_sum)
            tl.store(report + 1 + _ALTERNATIVES_MAX + alternative, best.to(tl.float32, bitcast=True))
            later = (x < peak) | ((x == peak) & (index > best))
            next_peak = tl.max(tl.where(later, x, float("-inf")), 0)
            after = tl.where(group == first, tl.where(next_peak == peak, best, -1), after)
            peaks = tl.where(group == first, next_peak, peaks)
