"""Matrix-vector products of a batch-1 decode step, each with what stands before and after it fused in.

    gemv        y = W x (+ residual, in place), x optionally RMS-normalised first
    gemv_gated  y = silu(G x) * (U x), x normalised; W stacks G over U
    gemv_rope   q, k, v = W x, x normalised; q and k rotated; q to a buffer, k and v into their page

One program computes a few rows over the whole of K with register tiles and FMA in float32: a batch of one has no use
for tensor cores, and no split over K means no second pass. The norm needs no pass of its own either:
W (x * gain * s) = s * (W (x * gain)) with s = 1 / sqrt(mean(x^2) + eps), so s is applied at the end. Weights are
loaded two tiles ahead, the first two before the PDL wait, so that they stream in while the previous kernel drains.
W is [N, K] row-major, in x's dtype or in fp8 (e4m3) with a float32 scale for each row: fp8 weights become float32 in
registers, x stays as it is, and the scale is applied to the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.norm import rms_norm_reference
from segue_kernels.programmatic_launch import launch_options
from segue_kernels.rope_store import kv_lines, rope_store_reference, rotate_halves


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Rows and columns of the weight tile that one program holds in registers, and its warps."""

    rows: int = 4
    columns: int = 1024
    warps: int = 4

    def fit(self, k: int) -> GemvTile:
        """The same tile for a smaller K: no wider than the next power of two."""
        return GemvTile(self.rows, min(self.columns, triton.next_power_of_2(k)), self.warps)


@triton.jit
def weight_tile(w_ptr, rows, N, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """W[rows, start : start + BLOCK_K], zeros outside."""
    columns = start + tl.arange(0, BLOCK_K)
    inside = (rows < N)[:, None]
    if K % BLOCK_K != 0:
        inside = inside & (columns < K)[None, :]
    offsets = rows.to(tl.int64)[:, None] * K + columns[None, :]
    return tl.load(w_ptr + offsets, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def first_tiles(w_ptr, rows, N, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The two tiles that `row_products` starts with; the second repeats the first where K has but one."""
    first = weight_tile(w_ptr, rows, N, 0, K, BLOCK_K)
    second = first
    if BLOCK_K < K:
        second = weight_tile(w_ptr, rows, N, BLOCK_K, K, BLOCK_K)
    return first, second


@triton.jit
def row_products(
    first,
    second,
    x_ptr,
    gain_ptr,
    w_ptr,
    rows,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Dot products of W[rows] with x (normalised with HAS_NORM), float32 [rows]; two tiles are loaded already."""
    sums = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(gain_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        current = first.to(tl.float32)
        first = second
        if start + 2 * BLOCK_K < K:
            second = weight_tile(w_ptr, rows, N, start + 2 * BLOCK_K, K, BLOCK_K)
        sums += current * x[None, :]
    products = tl.sum(sums, axis=1)
    if HAS_NORM:
        products *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    return products


@triton.jit
def chained_products(
    x_ptr,
    w_ptr,
    scales_ptr,
    gain_ptr,
    rows,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`row_products` as a link of a PDL chain: weights and scales are asked for before the wait, x after it."""
    if PDL:
        gdc_launch_dependents()
    first, second = first_tiles(w_ptr, rows, N, K, BLOCK_K)
    if HAS_SCALES:
        scales = tl.load(scales_ptr + rows, mask=rows < N, other=0.0)
    if PDL:
        gdc_wait()
    products = row_products(first, second, x_ptr, gain_ptr, w_ptr, rows, N, eps, K, BLOCK_K, HAS_NORM)
    if HAS_SCALES:
        products *= scales
    return products


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    gain_ptr,
    residual_ptr,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    products = chained_products(x_ptr, w_ptr, scales_ptr, gain_ptr, rows, N, eps, K, BLOCK_K, HAS_NORM, HAS_SCALES, PDL)
    if HAS_RESIDUAL:
        products += tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, products.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def gemv_gated_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    gain_ptr,
    out_ptr,
    width,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Gate and up rows alternate in the tile: even places gate, odd places the up row of the same output.
    place = tl.arange(0, 2 * BLOCK_N)
    out_rows = tl.program_id(0) * BLOCK_N + place // 2
    rows = tl.where(out_rows < width, out_rows + place % 2 * width, 2 * width)
    products = chained_products(
        x_ptr, w_ptr, scales_ptr, gain_ptr, rows, 2 * width, eps, K, BLOCK_K, True, HAS_SCALES, PDL
    )
    gate, up = tl.split(tl.reshape(products, [BLOCK_N, 2]))
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["layer"])
def gemv_rope_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    gain_ptr,
    rope_ptr,
    slot_ptr,
    q_ptr,
    pages_ptr,
    layer,
    page_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program owns BLOCK_N rotation pairs of one head; elements i and i + half alternate in the tile.
    HALF: tl.constexpr = DIM // 2
    GROUPS: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    N: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    head = tl.program_id(0) // GROUPS
    first_pair = tl.program_id(0) % GROUPS * BLOCK_N
    place = tl.arange(0, 2 * BLOCK_N)
    pairs = first_pair + place // 2
    rows = tl.where(pairs < HALF, head * DIM + pairs + place % 2 * HALF, N)
    products = chained_products(x_ptr, w_ptr, scales_ptr, gain_ptr, rows, N, eps, K, BLOCK_K, True, HAS_SCALES, PDL)
    low, high = tl.split(tl.reshape(products, [BLOCK_N, 2]))
    pair = first_pair + tl.arange(0, BLOCK_N)
    inside = pair < HALF
    if head < HEADS + KV_HEADS:
        low, high = rotate_halves(low, high, rope_ptr, pair, HALF)
    if head < HEADS:
        target = q_ptr + head * DIM + pair
        tl.store(target, low.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_ptr)
        if slot >= 0:
            kv = (head - HEADS) // KV_HEADS
            kv_head = head - HEADS - kv * KV_HEADS
            line = kv_lines(pages_ptr, slot, kv_head, kv, layer, page_stride, KV_HEADS, PAGE_SIZE, DIM)
            tl.store(line + pair, low.to(pages_ptr.dtype.element_ty), mask=inside)
            tl.store(line + HALF + pair, high.to(pages_ptr.dtype.element_ty), mask=inside)


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: GemvTile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [1, K], w [N, K] -> [1, N]; with `gain` x is normalised; with `residual` the result is added into it. `scales`
    float32 [1, N] are those of an fp8 w."""
    n, k = w.shape
    assert w.is_contiguous() and x.is_contiguous()
    tile = (tile or GemvTile()).fit(k)
    if out is None:
        out = x.new_empty(1, n) if residual is None else residual
    gemv_kernel[(triton.cdiv(n, tile.rows),)](
        x,
        w,
        w if scales is None else scales,
        w if gain is None else gain,
        out if residual is None else residual,
        out,
        n,
        eps,
        K=k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        HAS_NORM=gain is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALES=scales is not None,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
    return out


def gemv_gated(
    x: torch.Tensor,
    w: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: GemvTile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [1, K], w [2 * width, K] (gate over up) -> [1, width]. `tile.rows` counts outputs: twice as many rows."""
    width, k = w.shape[0] // 2, w.shape[1]
    assert w.is_contiguous() and x.is_contiguous()
    tile = (tile or GemvTile(rows=2)).fit(k)
    out = x.new_empty(1, width) if out is None else out
    gemv_gated_kernel[(triton.cdiv(width, tile.rows),)](
        x,
        w,
        w if scales is None else scales,
        gain,
        out,
        width,
        eps,
        K=k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        HAS_SCALES=scales is not None,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
    return out


def gemv_rope(
    x: torch.Tensor,
    w: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    slot: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    heads: int,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: GemvTile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [1, K] -> q [1, heads, dim]; rope [1, dim]; K and V land in `slot` (int64 [1], -1: nowhere)."""
    _, _, _, kv_heads, page_size, dim = kv_pages.shape
    k = w.shape[1]
    assert w.is_contiguous() and x.is_contiguous()
    tile = (tile or GemvTile(rows=2)).fit(k)
    out = x.new_empty(1, heads, dim) if out is None else out
    grid = ((heads + 2 * kv_heads) * triton.cdiv(dim // 2, tile.rows),)
    gemv_rope_kernel[grid](
        x,
        w,
        w if scales is None else scales,
        gain,
        rope,
        slot,
        out,
        kv_pages,
        layer,
        kv_pages.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        K=k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        HAS_SCALES=scales is not None,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
    return out


def linear_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The eager twin of `gemv` (and of `skinny_linear`), in float32 up to the final rounding; nothing in place."""
    wide = x.float() if gain is None else rms_norm_reference(x.float(), gain, eps)
    out = wide @ w.float().T
    out = out if scales is None else out * scales
    return (out if residual is None else out + residual.float()).to(x.dtype)


def gated_reference(
    x: torch.Tensor, w: torch.Tensor, gain: torch.Tensor, eps: float, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The eager twin of `gemv_gated`."""
    gate, up = linear_reference(x.float(), w, gain=gain, eps=eps, scales=scales).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def rope_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    slot: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    heads: int,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The eager twin of `gemv_rope`: same result, same effect on `kv_pages`."""
    qkv = linear_reference(x.float(), w, gain=gain, eps=eps, scales=scales)
    return rope_store_reference(qkv, rope, slot, kv_pages, layer, heads).to(x.dtype)
