"""Second pass of general sampling: the token of a row with top-k, top-p and min-p, without ordering its vocabulary.

A token with score x is kept when all three hold (ties at a boundary are all kept):

    min-p   x >= largest + log(min_p)
    top-k   fewer than k tokens score above x
    top-p   mass above x < top_p * mass of what min-p and top-k keep          mass = sum(exp(score - largest))

and the chosen token is argmax(score + Gumbel noise) over the kept ones. One program serves one place:

1. A bound below which nothing is kept, from the groups' peaks and masses alone (`shaped_logits`): the k-th largest
   peak; or the largest peak t such that the peaks >= t already hold top_p of the mass; or min-p's. Groups whose peak is
   under the bound are never read; tokens of the others at or above it become the list of candidates. With no bound
   (temperature alone) or too many candidates (a flat row with top-p) the list is the row itself.
2. top-k: the k-th largest candidate by bisection over the float's order-preserving integer.
3. The best noisy candidate v. If the mass above v is within top_p, v is the answer: it is the best of all, and kept.
   If not, nothing that scores x_v or less is kept, so the floor rises above x_v and the search repeats. A round ends
   with probability >= top_p, and is exact whatever the number of rounds.

Noise is exact only where it can win: a tile whose best approximate noisy score is under the best so far is skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels import row_sampling
from segue_kernels.noise import approximate_gumbel, better, first_best, gumbel, noise_row
from segue_kernels.shaped_logits import GROUP, float_word

_GROUP = tl.constexpr(GROUP)
_TOP_K, _TOP_P, _LOG_MIN_P = (
    tl.constexpr(word) for word in (row_sampling.TOP_K, row_sampling.TOP_P, row_sampling.LOG_MIN_P)
)
_PENALISED = tl.constexpr(row_sampling.PENALISED)
_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def ordered(x):
    """float32 <-> int32 of the same order (its own inverse): order_key(a) < order_key(b) when a < b."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def order_key(x):
    return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def key_value(key):
    return ordered(key).to(tl.float32, bitcast=True)


@triton.jit
def peak_bound(peaks, weights, wanted):
    """The largest of `peaks` such that the weights of those at or above it reach `wanted`; -inf when none does."""
    keys = order_key(peaks)
    low, high = tl.min(keys, 0).to(tl.int64), tl.max(keys, 0).to(tl.int64)
    enough = tl.sum(weights, 0) >= wanted
    while low < high:
        middle = (low + high + 1) >> 1
        reached = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return tl.where(enough, key_value(low.to(tl.int32)), float("-inf"))


@triton.jit
def collect(scores, group_list, groups_kept, bound, vocab_size, values, indices, list_max, TILE: tl.constexpr):
    """Tokens of the listed groups that score `bound` or more, into values / indices in order; returns how many there
    are, of which `list_max` fit."""
    lane = tl.arange(0, TILE)
    count = 0
    for start in range(0, groups_kept, TILE // _GROUP):
        slot = start + lane // _GROUP
        group = tl.load(group_list + slot, mask=slot < groups_kept, other=0)
        index = group * _GROUP + lane % _GROUP
        inside = (slot < groups_kept) & (index < vocab_size)
        x = tl.load(scores + index, mask=inside, other=float("-inf"))
        kept = (inside & (x >= bound)).to(tl.int32)
        at = count + tl.cumsum(kept, 0) - 1
        tl.store(values + at, x, mask=(kept > 0) & (at < list_max))
        tl.store(indices + at, index, mask=(kept > 0) & (at < list_max))
        count += tl.sum(kept, 0)
    return count


@triton.jit
def kth_largest(values, count, k, low, high, TILE: tl.constexpr):
    """Of values[:count], all with keys in low .. high, at least k of them."""
    lane = tl.arange(0, TILE)
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        above = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):
            x = tl.load(values + start + lane, mask=start + lane < count, other=float("-inf"))
            above += ((order_key(x) >= middle) & (start + lane < count)).to(tl.int32)
        reached = tl.sum(above, 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return key_value(low.to(tl.int32))


@triton.jit
def mass_from(values, count, low, largest, STRICT: tl.constexpr, TILE: tl.constexpr):
    """Mass of the values at or (STRICT) above `low`."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, count, TILE):
        x = tl.load(values + start + lane, mask=start + lane < count, other=float("-inf"))
        kept = x > low if STRICT else x >= low
        total += tl.where(kept, tl.exp(x - largest), 0.0)
    return tl.sum(total, 0)


@triton.jit
def noisy_best(
    values, indices, count, low, strict, low_word, high_word, position, LISTED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Token with the best noisy score among values at `low` (unless `strict`) or above; the lowest among equals."""
    margin: tl.constexpr = 0.01
    lane = tl.arange(0, TILE)
    word = noise_row(low_word, high_word, position)
    best = float("-inf")
    best_token = _NO_TOKEN
    for start in range(0, count, TILE):
        inside = start + lane < count
        x = tl.load(values + start + lane, mask=inside, other=float("-inf"))
        index = tl.load(indices + start + lane, mask=inside, other=0) if LISTED else start + lane
        kept = inside & ((x > low) | ((x == low) & (strict == 0)))
        rough = tl.where(kept, x + approximate_gumbel(word, index.to(tl.uint32)), float("-inf"))
        if tl.max(rough, 0) + margin >= best - tl.abs(best) * 1e-6:
            score = tl.where(kept, x + gumbel(word, index.to(tl.uint32)), float("-inf"))
            value, token = first_best(score, tl.where(kept, index, _NO_TOKEN))
            best, best_token = better(best, best_token, value, token)
    return best_token


@triton.jit
def filtered_choice(
    scores, values, indices, count, top_k, top_p, bound, floor, largest, whole, shares, low_word, high_word, position,
    LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3 of the module over values[:count]; `whole` is the row's mass, of use where `shares` says that top-p
    is a share of all of it."""
    if (top_k > 0) & (count > top_k):
        kth = kth_largest(values, count, top_k, order_key(bound), order_key(largest), TILE)
        floor = tl.maximum(floor, kth)
    if (top_p < 1.0) & (shares == 0):
        whole = mass_from(values, count, floor, largest, False, TILE)
    low = floor
    strict = 0
    token = _NO_TOKEN
    searching = 1
    while searching > 0:
        token = noisy_best(values, indices, count, low, strict, low_word, high_word, position, LISTED, TILE)
        low = tl.load(scores + tl.where(token == _NO_TOKEN, 0, token))
        strict = 1
        searching = 0
        if (top_p < 1.0) & (token != _NO_TOKEN):
            above = mass_from(values, count, low, largest, True, TILE)
            searching = (above >= top_p * whole).to(tl.int32)
    return token


@triton.jit
def choose_kernel(
    rows_ptr,
    positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    table_ptr,
    generated_ptr,
    scores_ptr,
    peaks_ptr,
    masses_ptr,
    invalid_ptr,
    groups_ptr,
    values_ptr,
    indices_ptr,
    chosen_value_ptr,
    chosen_index_ptr,
    chosen_invalid_ptr,
    vocab_size,
    groups,
    parts,
    chosen_stride,
    seeds_stride,
    table_stride,
    counts_stride,
    scores_stride,
    LIST_MAX: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_ptr + place).to(tl.int64)
    row_words = table_ptr + tl.maximum(row, 0) * table_stride
    flags = tl.load(row_words, mask=row >= 0, other=0)
    if flags != 0:
        temperature = tl.load(temperatures_ptr + place)
        scores = scores_ptr + place.to(tl.int64) * scores_stride
        values = values_ptr + place * LIST_MAX
        indices = indices_ptr + place * LIST_MAX
        part = tl.arange(0, PARTS_BLOCK)
        failed = tl.max(tl.load(invalid_ptr + place * parts + part, mask=part < parts, other=0), 0)
        group = tl.arange(0, GROUPS_BLOCK)
        at = place.to(tl.int64) * groups + group
        peaks = tl.load(peaks_ptr + at, mask=group < groups, other=float("-inf"))
        largest = tl.max(peaks, 0)
        failed = tl.where(tl.abs(largest) == float("inf"), 1, failed)
        token = _NO_TOKEN
        if failed == 0:
            if temperature == 0:
                # The first group that holds the largest score, and the first of its tokens that has it.
                first = tl.min(tl.where(peaks == largest, group, _NO_TOKEN), 0)
                index = first * _GROUP + tl.arange(0, _GROUP)
                x = tl.load(scores + index, mask=index < vocab_size, other=float("-inf"))
                token = tl.min(tl.where(x == largest, index, _NO_TOKEN), 0)
            else:
                low_word = tl.load(seeds_ptr + place).to(tl.uint32, bitcast=True)
                high_word = tl.load(seeds_ptr + seeds_stride + place).to(tl.uint32, bitcast=True)
                position = (tl.load(positions_ptr + place) + 1).to(tl.uint32, bitcast=True)
                top_k = tl.load(row_words + _TOP_K)
                top_k = tl.where(top_k < vocab_size, top_k, 0)
                top_p = float_word(row_words, _TOP_P)
                floor = largest + float_word(row_words, _LOG_MIN_P)
                bound = floor
                scale = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - largest))
                whole = tl.sum(tl.load(masses_ptr + at, mask=group < groups, other=0.0) * scale, 0)
                shares = (top_k == 0) & (floor == float("-inf"))
                if top_k > 0:
                    bound = tl.maximum(bound, peak_bound(peaks, tl.where(group < groups, 1.0, 0.0), top_k))
                elif shares & (top_p < 1.0):
                    # A little more than needed, as sums in another order differ in their last bits.
                    bound = peak_bound(peaks, scale, top_p * whole * 1.0001)
                count = LIST_MAX + 1
                if bound > float("-inf"):
                    kept = (group < groups) & (peaks >= bound)
                    group_list = groups_ptr + place.to(tl.int64) * groups
                    tl.store(group_list + tl.cumsum(kept.to(tl.int32), 0) - 1, group, mask=kept)
                    tl.debug_barrier()
                    groups_kept = tl.sum(kept.to(tl.int32), 0)
                    count = collect(scores, group_list, groups_kept, bound, vocab_size, values, indices, LIST_MAX, TILE)
                    tl.debug_barrier()
                if count > LIST_MAX:
                    token = filtered_choice(
                        scores, scores, indices, vocab_size, top_k, top_p, bound, floor, largest, whole, shares,
                        low_word, high_word, position, False, TILE,
                    )  # fmt: skip
                else:
                    token = filtered_choice(
                        scores, values, indices, count, top_k, top_p, bound, floor, largest, whole, shares,
                        low_word, high_word, position, True, TILE,
                    )  # fmt: skip
        failed = tl.where(token == _NO_TOKEN, 1, failed)
        tl.store(chosen_value_ptr + place * chosen_stride, 0.0)
        tl.store(chosen_index_ptr + place * chosen_stride, tl.where(failed > 0, 0, token))
        tl.store(chosen_invalid_ptr + place * chosen_stride, failed)
        if ((flags & _PENALISED) != 0) & (failed == 0):
            count_ptr = generated_ptr + row * counts_stride + token
            tl.store(count_ptr, tl.load(count_ptr) + 1)
