"""Linear layers for small batches (2 to 64 rows) with tensor cores, bound by the read of the weights.

    skinny_linear  y = x W^T (+ residual, in place)
    skinny_gated   y = silu(x G^T) * (x U^T); W stacks G over U

The product is computed transposed, W tile times x^T, so that the weights fill the wide side of the matrix unit and the
few rows of x its narrow side. The weight stream is software-pipelined through shared memory (`stages`). Before the PDL
wait a program prefetches its first weight columns into L2: the copies of the pipeline itself cannot start before the
wait, as they share the loop with the activations. W is [N, K] row-major, x [M, K]; sums in float32. W may be in fp8
(e4m3) with a float32 scale for each row: it becomes x's dtype in registers, exactly, and the scale is applied to the
sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.programmatic_launch import launch_options


@dataclass(frozen=True, slots=True)
class DotTile:
    """Weight rows and columns of one pipeline stage, stages and warps; columns prefetched into L2 before the wait."""

    rows: int = 32
    columns: int = 256
    stages: int = 4
    warps: int = 4
    prefetch: int = 1024


@triton.jit
def prefetch_rows(w_ptr, rows, N, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for W[rows, 0 : COLUMNS] to be brought into L2, a line of 128 bytes for each address."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.arange(0, COLUMNS // LINE) * LINE
    kept = tl.minimum(rows, N - 1).to(tl.int64)
    addresses = (w_ptr + kept[:, None] * K + tl.minimum(columns, K - 1)[None, :]).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def skinny_linear_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """With GATED, N is the width of the output and W has 2 * N rows."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(w_ptr, rows, N, K, PREFETCH)
            if GATED:
                prefetch_rows(w_ptr + N.to(tl.int64) * K, rows, N, K, PREFETCH)
        gdc_wait()
    inside_rows = (rows < N)[:, None]
    inside_tokens = (tokens < M)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    sums_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * K
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + tokens[None, :] * K + columns[:, None],
            mask=inside_tokens if K % BLOCK_K == 0 else inside_tokens & (columns < K)[:, None],
            other=0.0,
        )
        inside = inside_rows if K % BLOCK_K == 0 else inside_rows & (columns < K)[None, :]
        w = tl.load(w_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        if UPCAST:
            x = x.to(tl.float32)
        sums = tl.dot(w.to(x.dtype), x, sums, input_precision="ieee")
        if GATED:
            up_rows = w_rows + N.to(tl.int64) * K
            w_up = tl.load(up_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            sums_up = tl.dot(w_up.to(x.dtype), x, sums_up, input_precision="ieee")
    if HAS_SCALES:
        sums *= tl.load(scales_ptr + rows, mask=rows < N, other=0.0)[:, None]
        if GATED:
            sums_up *= tl.load(scales_ptr + N + rows, mask=rows < N, other=0.0)[:, None]
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * sums_up
    offsets = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + offsets, mask=inside_rows & inside_tokens, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=inside_rows & inside_tokens)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor | None,
    n: int,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    gated: bool,
    tile: DotTile,
    pdl: bool,
) -> torch.Tensor:
    m, k = x.shape
    assert w.is_contiguous() and x.is_contiguous()
    columns = min(tile.columns, triton.next_power_of_2(k))
    skinny_linear_kernel[(triton.cdiv(n, tile.rows),)](
        x,
        w,
        w if scales is None else scales,
        out if residual is None else residual,
        out,
        m,
        n,
        K=k,
        BLOCK_M=max(8, triton.next_power_of_2(m)),
        BLOCK_N=tile.rows,
        BLOCK_K=columns,
        STAGES=tile.stages,
        PREFETCH=tile.prefetch,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALES=scales is not None,
        UPCAST=knobs.runtime.interpret,
        PDL=pdl,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
    return out


def skinny_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: DotTile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [M, K], w [N, K] -> [M, N], M <= 64; with `residual` the result is added into it. `out` may be float32.
    `scales` float32 [1, N] are those of an fp8 w."""
    if out is None:
        out = x.new_empty(x.shape[0], w.shape[0]) if residual is None else residual
    return _launch(x, w, scales, w.shape[0], out, residual, False, tile or DotTile(), pdl)


def skinny_gated(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: DotTile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [M, K], w [2 * width, K] (gate over up) -> [M, width], M <= 64."""
    width = w.shape[0] // 2
    out = x.new_empty(x.shape[0], width) if out is None else out
    return _launch(x, w, scales, width, out, None, True, tile or DotTile(), pdl)
