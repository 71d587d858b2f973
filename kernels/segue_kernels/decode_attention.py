"""Decode attention over paged K/V: a few queries per row against everything the row has cached.

Two kernels. `decode_attention_kernel` runs one program for each (split of a row, kv-head); the query heads of one
kv-head, times the row's queries, are packed into the M dimension of the tensor cores, so that K/V is read once. A row
cut into several splits leaves normalised partial results and their log-sum-exp; `combine_splits_kernel` merges them:

    out = sum_s 2^(lse_s - peak) out_s / sum_s 2^(lse_s - peak)

(a last-arriver merge inside the first kernel was measured slower). Pages are `[page][layer][K|V][kv_head][token][dim]`,
addressed by strides with 64-bit offsets. Floor: K/V bytes over the memory bandwidth.

With PDL (see `programmatic_launch`) the kernels read q, pages and partial results after the wait, and before it only
the work list, which the step's planning kernel wrote; that one is launched without PDL and precedes the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda as tl_cuda

from segue_kernels.attention_plan import DecodeWork, plan_decode_work
from segue_kernels.attention_tiles import attend_tiles, empty_softmax, exponent_factor, open_row
from segue_kernels.programmatic_launch import launch_options

PACKED_MAX = 128
"""Query heads of a kv-head times queries of a row: more would not fit the registers of one tile."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Launch shape of the split kernel: `tile` tokens are read at a time, stages count the page-id load, and the last
    two are arguments of `plan_decode_work`."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 6
    chunk_one_wave_max: int = 1024


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step's decode work for all layers that share `window`. partial float32 [items, heads * queries_max, dim],
    lse float32 [items, heads * queries_max]."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    work: DecodeWork
    partial: torch.Tensor
    lse: torch.Tensor
    queries_max: int
    window: int | None
    tiling: DecodeTiling
    aligned: bool = False
    """Splits and places in tiles follow from positions alone."""


@triton.jit(do_not_specialize=["stride_table"])
def decode_attention_kernel(
    q,
    kv,
    kv_scales,
    out,
    partial,
    lse,
    items,
    block_tables,
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
    QUERIES_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    item = tl.program_id(1)
    row = tl.load(items + item * 8)
    begin = tl.load(items + item * 8 + 1)
    end = tl.load(items + item * 8 + 2)
    splits = tl.load(items + item * 8 + 3)
    length = tl.load(items + item * 8 + 4)
    query_first = tl.load(items + item * 8 + 5)
    queries = tl.load(items + item * 8 + 6)
    if PDL:
        tl_cuda.gdc_wait()
    if row < 0:
        return

    packed = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_BLOCK)
    query = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    wanted = query < queries
    if ALIGNED:
        # A query's place in the tile follows from its position, whichever others the row brings.
        lane = (length - queries) % QUERIES_MAX
        query -= lane
        packed -= lane * GROUP
        wanted = (query >= 0) & (query < queries)
    q_mask = wanted[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = (query_first + query).to(tl.int64)[:, None] * stride_q_token + head[:, None] * stride_q_head
    q_tile = tl.load(q + q_offsets + dim[None, :], mask=q_mask, other=0.0)
    position = length - queries + query
    q_tile, scale, keys, values, table = open_row(
        q_tile, kv, kv_scales, kv_head, scale, block_tables, row, stride_kind, stride_head, stride_table,
        HAS_SCALES, UPCAST,
    )  # fmt: skip
    factor = exponent_factor(scale, HAS_CAP)
    peak, total, result = empty_softmax(BLOCK_M, DIM_BLOCK)
    whole = begin
    if QUERIES_MAX > 1 and not HAS_WINDOW and not ALIGNED:
        # Keys up to the row's first query are visible to all its queries.
        whole = tl.maximum(begin, tl.minimum(end, length - queries + 1) // TILE * TILE)
        peak, total, result = attend_tiles(
            begin, whole, end, q_tile, peak, total, result, keys, values, table, position, scale, soft_cap, window,
            stride_page, STRIDE_TOKEN, HEAD_DIM, DIM_BLOCK, PAGE, TILE, HAS_WINDOW, HAS_CAP, False, False,
        )  # fmt: skip
    peak, total, result = attend_tiles(
        whole, end, end, q_tile, peak, total, result, keys, values, table, position, scale, soft_cap, window,
        stride_page, STRIDE_TOKEN, HEAD_DIM, DIM_BLOCK, PAGE, TILE, HAS_WINDOW, HAS_CAP, True,
        HAS_WINDOW or QUERIES_MAX > 1,
    )  # fmt: skip

    # A query that saw no key in this split has total 0 and peak -inf: its result is 0 with a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = result / total[:, None]
    if HAS_SCALES:
        result = result * tl.load(kv_scales + kv_heads + kv_head)
    if splits == 1:
        out_offsets = (query_first + query).to(tl.int64)[:, None] * stride_out_token + head[:, None] * stride_out_head
        tl.store(out + out_offsets + dim[None, :], result.to(out.dtype.element_ty), mask=q_mask)
    else:
        slot = (item * kv_heads + kv_head) * (GROUP * QUERIES_MAX) + packed
        tl.store(partial + slot.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], result, mask=q_mask)
        tl.store(lse + slot, peak * factor + tl.log2(total), mask=wanted)


@triton.jit
def combine_splits_kernel(
    out,
    partial,
    lse,
    row_items,
    query_starts,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    PLACES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    first = tl.load(row_items + row * 2)
    splits = tl.load(row_items + row * 2 + 1)
    query_first = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - query_first
    if PDL:
        tl_cuda.gdc_wait()
    if (splits < 0) | (splits == 1):
        return

    place = tl.program_id(0) * PLACES_BLOCK + tl.arange(0, PLACES_BLOCK)
    packed = place % (GROUP * QUERIES_MAX)
    query = packed // GROUP
    head = place // (GROUP * QUERIES_MAX) * GROUP + packed % GROUP
    wanted = (place < HEADS * QUERIES_MAX) & (query < queries)
    dim = tl.arange(0, DIM_BLOCK)
    peak = tl.full([PLACES_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([PLACES_BLOCK], tl.float32)
    result = tl.zeros([PLACES_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(0, splits, SPLITS_BLOCK):
        split = start + tl.arange(0, SPLITS_BLOCK)
        index = (first + split)[:, None] * (HEADS * QUERIES_MAX) + place[None, :]
        known = (split < splits)[:, None] & wanted[None, :]
        logs = tl.load(lse + index, mask=known, other=float("-inf"))
        parts = tl.load(
            partial + index.to(tl.int64)[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=known[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        peak_next = tl.maximum(peak, tl.max(logs, 0))
        shift = tl.where(peak_next == float("-inf"), 0.0, peak_next)
        weights = tl.exp2(logs - shift[None, :])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weights, 0)
        result = result * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = peak_next
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = (query_first + query).to(tl.int64) * stride_out_token + head * stride_out_head
    mask = wanted[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + offset[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


def combine_blocks(rows: int, packed: int, aligned: bool = False) -> tuple[int, int]:
    """(splits, places) that one program of the combine kernel merges at a time: few rows are cut into many splits, and
    each pass over them costs a memory latency; many rows mostly have one split, and their programs only look and leave,
    so there should be few (64 rows of one split, one place a program: 8.4 us). Aligned: one split after the other, as
    the order must not depend on rows nor on how many leading splits a window hides."""
    if aligned:
        return 1, 16
    return (64, 1) if rows <= 16 and packed <= 16 else (4, 16)


def decode_tiling(head_dim: int, kv_dtype: torch.dtype, *, rows: int = 64, packed: int = 16) -> DecodeTiling:
    """`packed`: query heads of a kv-head times queries of a row.

    Few: the kernel is bound by memory, with tiles of 16 KiB for K and for V. Three buffers of them (7 stages) leave two
    programs to a multiprocessor; measured on an H200 with 32 rows of 1k they read 3.7 TB/s and two buffers 3.2, but one
    row of 32k prefers three programs with two (3.5 against 3.2). In fp8 64 rows of 8k read 3.7 TB/s, with 4 warps 3.0.
    Many: bound by the tensor cores, and splits cost partial results, so that they only just fill the GPU: two programs
    to a multiprocessor (128 queries on 8k: 56 us, one program 86, two with shorter pipelines 67).
    """
    if packed > 16:
        warps = 4 if packed <= 64 and head_dim <= 128 else 8
        tile = 64 if head_dim <= 128 else 32
        return DecodeTiling(tile, warps, num_stages=5, programs_per_sm=2, chunk_one_wave_max=1 << 30)
    tile = min(64, max(16, 16384 // (triton.next_power_of_2(head_dim) * kv_dtype.itemsize)))
    warps = 2 if head_dim <= 128 else 4
    if rows <= 2:
        return DecodeTiling(tile, warps, num_stages=5, programs_per_sm=12)
    return DecodeTiling(tile, warps, num_stages=7, programs_per_sm=6)


def plan_decode(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    queries_above: int = 0,
    queries_max: int = 1,
    window: int | None = None,
    tiling: DecodeTiling | None = None,
    split_tokens: int = 0,
    items_max: int = 0,
) -> DecodePlan:
    """Work list and buffers for one step, for the rows with queries_above < queries <= queries_max; others are left
    alone. Only launches work on the device, so it may be captured in a graph.

    block_tables int32 [rows, blocks_max], seq_lens int32 [rows], query_starts int32 [rows + 1]. The tensors are kept:
    a replay of the captured plan reads their values of that time. ValueError when the packed queries exceed a tile.

    `split_tokens` (a multiple of the tile) makes results independent of the batch: keys are cut at its multiples, into
    `items_max` splits of all rows at most. It takes a `tiling` of the caller's, rows whose queries stand in one block
    of `queries_max` positions, and a `queries_max` that divides the tile.
    """
    packed = heads // kv_heads * queries_max
    if packed > PACKED_MAX:
        raise ValueError(f"{heads // kv_heads} heads per kv-head x {queries_max} queries exceed one tile: {PACKED_MAX}")
    tiling = tiling or decode_tiling(head_dim, kv_dtype, rows=seq_lens.shape[0], packed=packed)
    work = plan_decode_work(
        seq_lens,
        query_starts,
        kv_heads=kv_heads,
        tile=tiling.tile,
        queries_above=queries_above,
        queries_max=queries_max,
        window=window,
        programs_per_sm=tiling.programs_per_sm,
        chunk_one_wave_max=tiling.chunk_one_wave_max,
        split_tokens=split_tokens,
        split_items_max=items_max,
    )
    slots, device = work.items.shape[0], seq_lens.device
    return DecodePlan(
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        work=work,
        partial=torch.empty(slots, heads * queries_max, head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(slots, heads * queries_max, dtype=torch.float32, device=device),
        queries_max=queries_max,
        window=window,
        tiling=tiling,
        aligned=split_tokens > 0,
    )


def decode_attention(
    plan: DecodePlan,
    layer: int,
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of the plan's rows into `out` (returned). q, out [tokens, heads, dim], dim contiguous.

    kv_pages [pages, layers, 2, kv_heads, block, dim] in q's dtype, or fp8 with kv_scales float32 [layers, 2, kv_heads].
    `pdl`: launch as links of a PDL chain, in which planning came earlier (compute capability 9.0).
    """
    _, heads, head_dim = q.shape
    kv_heads, block_size = kv_pages.shape[3], kv_pages.shape[4]
    assert q.stride(-1) == 1 and out.stride(-1) == 1 and kv_pages.stride(-1) == 1
    group, dim_block = heads // kv_heads, triton.next_power_of_2(head_dim)
    decode_attention_kernel[(kv_heads, plan.work.items.shape[0])](
        q,
        kv_pages[:, layer],
        plan.lse if kv_scales is None else kv_scales[layer],
        out,
        plan.partial,
        plan.lse,
        plan.work.items,
        plan.block_tables,
        scale,
        soft_cap or 0.0,
        plan.window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv_pages.stride(0),
        kv_pages.stride(2),
        kv_pages.stride(3),
        plan.block_tables.stride(0),
        STRIDE_TOKEN=kv_pages.stride(4),
        GROUP=group,
        QUERIES_MAX=plan.queries_max,
        BLOCK_M=max(16, triton.next_power_of_2(group * plan.queries_max)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        PAGE=block_size,
        TILE=plan.tiling.tile,
        HAS_WINDOW=plan.window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SCALES=kv_scales is not None,
        UPCAST=knobs.runtime.interpret,
        ALIGNED=plan.aligned,
        PDL=pdl,
        num_warps=plan.tiling.num_warps,
        num_stages=plan.tiling.num_stages,
        **launch_options(pdl),
    )
    rows = plan.seq_lens.shape[0]
    splits_block, places_block = combine_blocks(rows, group * plan.queries_max, plan.aligned)
    combine_splits_kernel[(triton.cdiv(heads * plan.queries_max, places_block), rows)](
        out,
        plan.partial,
        plan.lse,
        plan.work.rows,
        plan.query_starts,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        QUERIES_MAX=plan.queries_max,
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        SPLITS_BLOCK=splits_block,
        PLACES_BLOCK=places_block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
