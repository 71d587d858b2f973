"""Prefill attention over paged K/V: blocks of many queries per row, causal, on top of any cached prefix.

One program for each (block of BLOCK_M queries of one row, query head); blocks come from a work list, so that ragged
batches waste at most one partial block per row. A program walks its keys in tiles: first those that every query of the
block sees (no masks), then the diagonal. With a window the walk starts at the first key that any query sees.
Floor: 4 * dim FLOPs for each (query, visible key) pair over the tensor-core rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda as tl_cuda

from segue_kernels.attention_plan import plan_prefill_work
from segue_kernels.attention_tiles import attend_tiles, empty_softmax, open_row
from segue_kernels.programmatic_launch import launch_options

QUERIES_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One step's prefill work for all layers.
    items int32 [items_max, 2]: (row or -1, first query of the block)."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    items: torch.Tensor
    tiling: PrefillTiling


@triton.jit(do_not_specialize=["stride_table"])
def prefill_attention_kernel(
    q,
    kv,
    kv_scales,
    out,
    items,
    block_tables,
    seq_lens,
    query_starts,
    scale,
    soft_cap,
    window,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_page,
    stride_kind,
    stride_head,
    stride_table,
    STRIDE_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items + item * 2)
    block = tl.load(items + item * 2 + 1)
    if PDL:
        tl_cuda.gdc_wait()
    if row < 0:
        return
    length = tl.load(seq_lens + row)
    query_first = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - query_first

    query = block + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    q_mask = (query < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    token = (query_first + query).to(tl.int64)[:, None]
    q_tile = tl.load(q + token * stride_q_token + head * stride_q_head + dim[None, :], mask=q_mask, other=0.0)
    prefix = length - queries
    position = prefix + query
    kv_head = head // GROUP
    q_tile, scale, keys, values, table = open_row(
        q_tile, kv, kv_scales, kv_head, scale, block_tables, row, stride_kind, stride_head, stride_table,
        HAS_SCALES, UPCAST,
    )  # fmt: skip
    peak, total, result = empty_softmax(BLOCK_M, DIM_BLOCK)
    limit = tl.minimum(length, prefix + block + BLOCK_M)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(prefix + block + 1 - window, 0) // TILE * TILE
    else:
        # Keys up to the block's first query are visible to the whole block.
        stop = (prefix + block + 1) // TILE * TILE
        peak, total, result = attend_tiles(
            begin, stop, limit, q_tile, peak, total, result, keys, values, table, position, scale, soft_cap, window,
            stride_page, STRIDE_TOKEN, HEAD_DIM, DIM_BLOCK, PAGE, TILE, HAS_WINDOW, HAS_CAP, False, HAS_WINDOW,
        )  # fmt: skip
        begin = stop
    peak, total, result = attend_tiles(
        begin, limit, limit, q_tile, peak, total, result, keys, values, table, position, scale, soft_cap, window,
        stride_page, STRIDE_TOKEN, HEAD_DIM, DIM_BLOCK, PAGE, TILE, HAS_WINDOW, HAS_CAP, True, HAS_WINDOW,
    )  # fmt: skip

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_SCALES:
        result = result * tl.load(kv_scales + (tl.num_programs(0) // GROUP) + kv_head)
    out_offsets = token * stride_out_token + head * stride_out_head + dim[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=q_mask)


def prefill_tiling(head_dim: int, q_dtype: torch.dtype) -> PrefillTiling:
    """Measured on an H200 at D 128 in bf16, TFLOP/s at 8k: 64 x 64 with 4 warps and 5 stages 483, with 3 stages 431;
    128 x 32 with 5 stages 439; 128 x 64 with 3 stages 396 (its addresses spill), with 8 warps 361."""
    if q_dtype == torch.float32:
        return PrefillTiling(block_m=16, tile=16, num_warps=4, num_stages=3)
    if head_dim > 128:
        return PrefillTiling(block_m=128, tile=32, num_warps=8, num_stages=4)
    return PrefillTiling(block_m=64, tile=64, num_warps=4, num_stages=5)


def plan_prefill(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    head_dim: int,
    q_dtype: torch.dtype,
    max_query: int,
    max_tokens: int | None = None,
    queries_above: int = 0,
    queries_below: int = QUERIES_UNBOUNDED,
    query_counts: tuple[int, ...] | None = None,
    tiling: PrefillTiling | None = None,
) -> PrefillPlan:
    """Work list, made on the device, of the rows with queries_above < queries < queries_below.

    `query_counts`, where the host has them, make the grid exact; otherwise it covers rows * ceil(max_query / block_m)
    blocks, or what `max_tokens` queries in all rows together may need. The tensors are kept, as in `plan_decode`.
    """
    tiling = tiling or prefill_tiling(head_dim, q_dtype)
    if query_counts is None:
        items_max = seq_lens.shape[0] * triton.cdiv(max_query, tiling.block_m)
        if max_tokens is not None:
            items_max = min(items_max, seq_lens.shape[0] + max_tokens // tiling.block_m)
    else:
        blocks = (triton.cdiv(count, tiling.block_m) for count in query_counts if queries_above < count < queries_below)
        items_max = sum(blocks)
    items = plan_prefill_work(
        query_starts,
        block_m=tiling.block_m,
        queries_above=queries_above,
        queries_below=queries_below,
        items_max=max(1, items_max),
    )
    return PrefillPlan(block_tables, seq_lens, query_starts, items, tiling)


def prefill_attention(
    plan: PrefillPlan,
    layer: int,
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of the plan's rows into `out` (returned). q, out [tokens, heads, dim], dim contiguous.

    kv_pages [pages, layers, 2, kv_heads, block, dim] in q's dtype, or fp8 with kv_scales float32 [layers, 2, kv_heads].
    """
    _, heads, head_dim = q.shape
    assert q.stride(-1) == 1 and out.stride(-1) == 1 and kv_pages.stride(-1) == 1
    prefill_attention_kernel[(heads, plan.items.shape[0])](
        q,
        kv_pages[:, layer],
        plan.seq_lens if kv_scales is None else kv_scales[layer],
        out,
        plan.items,
        plan.block_tables,
        plan.seq_lens,
        plan.query_starts,
        scale,
        soft_cap or 0.0,
        window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv_pages.stride(0),
        kv_pages.stride(2),
        kv_pages.stride(3),
        plan.block_tables.stride(0),
        STRIDE_TOKEN=kv_pages.stride(4),
        GROUP=heads // kv_pages.shape[3],
        BLOCK_M=plan.tiling.block_m,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        PAGE=kv_pages.shape[4],
        TILE=plan.tiling.tile,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SCALES=kv_scales is not None,
        UPCAST=knobs.runtime.interpret,
        PDL=pdl,
        num_warps=plan.tiling.num_warps,
        num_stages=plan.tiling.num_stages,
        **launch_options(pdl),
    )
    return out
