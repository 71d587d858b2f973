"""Device functions shared by the paged attention kernels: tiles of K and V, scores, and the running softmax.

Softmax is computed with the hardware's exp2; log-sum-exp are logarithms to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def open_row(
    q_tile,
    kv,
    kv_scales,
    kv_head,
    scale,
    block_tables,
    row,
    stride_kind,
    stride_head,
    stride_table,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """What a program's loop starts from: (q in the type of the products, scale with that of stored keys, places of the
    kv-head's keys and values in page 0, the row's block table)."""
    if HAS_SCALES:
        scale = scale * tl.load(kv_scales + kv_head)
    if kv.dtype.element_ty.primitive_bitwidth == 8:
        # fp8 becomes fp16 exactly and in one instruction for two numbers, bf16 only by way of float32.
        q_tile = q_tile.to(tl.float16)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    keys = kv + kv_head * stride_head
    return q_tile, scale, keys, keys + stride_kind, block_tables + row.to(tl.int64) * stride_table


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """(peak, total, result) of `softmax_step` before the first key."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)


@triton.jit
def tile_places(table, start, limit, stride_page, STRIDE_TOKEN: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Where tokens start .. start+TILE-1 of one row lie: (int64 page offset, int32 [TILE] offset from there).

    `start` is a multiple of TILE, so that a tile lies in one page where PAGE is a multiple of TILE, and the page offset
    is a scalar; for other page sizes every token's page is looked up and the page offset is [TILE]. Tokens at or past
    `limit` get the place of some readable page.
    """
    if PAGE % TILE == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        page_offset = page * stride_page + start % PAGE * STRIDE_TOKEN
        within = tl.arange(0, TILE) * STRIDE_TOKEN
    else:
        token = start + tl.arange(0, TILE)
        page_offset = tl.load(table + token // PAGE, mask=token < limit, other=0).to(tl.int64) * stride_page
        within = (token % PAGE) * STRIDE_TOKEN
    return page_offset, within


@triton.jit
def load_tile(
    base,
    page_offset,
    within,
    start,
    limit,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """K or V [TILE, DIM_BLOCK]; zeros in padded dims and, when MASKED, at or past `limit` (stale bytes may be NaN)."""
    dim = tl.arange(0, DIM_BLOCK)
    if PAGE % TILE == 0:
        pointers = (base + page_offset) + (within[:, None] + dim[None, :])
    else:
        pointers = (base + page_offset[:, None]) + (within[:, None] + dim[None, :])
    if MASKED:
        token = start + tl.arange(0, TILE)
        tile = tl.load(pointers, mask=(token < limit)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != DIM_BLOCK:
        tile = tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def score_tile(q, k, scale, soft_cap, HAS_CAP: tl.constexpr):
    """q [M, D] . k [TILE, D] transposed -> float32 [M, TILE]: soft-capped scores, or bare products without a cap.

    Bare products keep `scale` out of the loop: `softmax_step` applies it in the same fused multiply-add as its shift.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_CAP:
        # tanh by way of the sigmoid: exact to float32 rounding, and available in the interpreter.
        scores = soft_cap * (2.0 * tl.sigmoid(scores * (2.0 * scale / soft_cap)) - 1.0)
    return scores


@triton.jit
def exponent_factor(scale, HAS_CAP: tl.constexpr):
    """What turns `score_tile`'s numbers into exponents of 2."""
    log2_e: tl.constexpr = 1.4426950408889634
    return log2_e if HAS_CAP else scale * log2_e


@triton.jit
def softmax_step(scores, factor, peak, total, out, v, MAYBE_EMPTY: tl.constexpr):
    """One online-softmax update. peak, total float32 [M]; out float32 [M, D]; v [TILE, D].

    `peak` is in units of `scores`; weights are 2^(factor * (scores - peak)), with factor > 0. MAYBE_EMPTY: some query
    may have seen no key yet, so that its peak is -inf and must not be subtracted from itself.
    """
    peak_next = tl.maximum(peak, tl.max(scores, 1))
    shift = factor * (tl.where(peak_next == float("-inf"), 0.0, peak_next) if MAYBE_EMPTY else peak_next)
    weights = tl.exp2(scores * factor - shift[:, None])
    rescale = tl.exp2(peak * factor - shift)
    total = total * rescale + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    return peak_next, total, out


@triton.jit
def attend_tiles(
    begin,
    stop,
    limit,
    q_tile,
    peak,
    total,
    result,
    keys,
    values,
    table,
    position,
    scale,
    soft_cap,
    window,
    stride_page,
    STRIDE_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    MAYBE_EMPTY: tl.constexpr,
):
    """Take the keys begin .. stop-1 of one row into the running softmax of `q_tile`, whose queries stand at `position`.

    Unmasked, every query must see all of them, and stop - begin is a multiple of TILE; masked, tokens from `limit` on
    and those that a query does not see are left out. MAYBE_EMPTY as in `softmax_step`.
    """
    factor = exponent_factor(scale, HAS_CAP)
    for start in range(begin, stop, TILE):
        page_offset, within = tile_places(table, start, limit, stride_page, STRIDE_TOKEN, PAGE, TILE)
        k = load_tile(keys, page_offset, within, start, limit, HEAD_DIM, DIM_BLOCK, PAGE, TILE, MASKED).to(q_tile.dtype)
        scores = score_tile(q_tile, k, scale, soft_cap, HAS_CAP)
        if MASKED:
            token = (start + tl.arange(0, TILE))[None, :]
            visible = (token <= position[:, None]) & (token < limit)
            if HAS_WINDOW:
                visible = visible & (token > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        v = load_tile(values, page_offset, within, start, limit, HEAD_DIM, DIM_BLOCK, PAGE, TILE, MASKED).to(
            q_tile.dtype
        )
        peak, total, result = softmax_step(scores, factor, peak, total, result, v, MAYBE_EMPTY)
    return peak, total, result
