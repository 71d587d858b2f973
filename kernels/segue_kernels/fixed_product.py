"""Matrix products of one fixed shape, so that a row has the same bits in every batch: y = x W^T.

x [M, K], W [N, K] row-major, y [M, N]. One program computes BLOCK_M rows of x with BLOCK_N rows of W over the whole of
K, BLOCK_K columns at a time and in order, in float32; there is no split over K. The tile depends on W alone: a library
would choose it, and a split, by M. Rows beyond M are zeros, so that one row takes the same instructions as sixty-four.

Floor: the larger of W's bytes over the memory bandwidth and 2 M N K FLOPs over the tensor-core rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs


@dataclass(frozen=True, slots=True)
class FixedTile:
    """Rows of x and of W in one program, columns of one step, and the launch."""

    tokens: int = 64
    rows: int = 128
    columns: int = 64
    warps: int = 4
    stages: int = 4


NARROW, NARROW_ROWS = 8192, 32
"""Outputs below which tiles of 128 would leave most of a GPU's 132 multiprocessors without weights to read."""

FLOAT32_TILE = FixedTile(tokens=16, rows=32, columns=32, stages=2)
"""Without tensor cores registers bound the tile."""


def fixed_tile(outputs: int, dtype: torch.dtype) -> FixedTile:
    """By the weight alone."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    return FixedTile(rows=NARROW_ROWS) if outputs < NARROW else FixedTile()


@triton.jit(do_not_specialize=["M"])
def fixed_product_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * K
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * K
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = (columns < K)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=(tokens < M)[:, None] & inside, other=0.0)
        w = tl.load(w_rows + columns[None, :], mask=(rows < N)[:, None] & inside, other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    offsets = tokens.to(tl.int64)[:, None] * N + rows[None, :]
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=mask)


def fixed_product(
    x: torch.Tensor, w: torch.Tensor, *, out_dtype: torch.dtype | None = None, tile: FixedTile | None = None
) -> torch.Tensor:
    """x [M, K], w [N, K], both contiguous and of one dtype -> [M, N] in `out_dtype` (x's own by default). A `tile` of
    the caller's must be the same in every call whose rows are to agree."""
    rows, inner = x.shape
    outputs = w.shape[0]
    assert x.is_contiguous() and w.is_contiguous()
    out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = tile or fixed_tile(outputs, x.dtype)
    fixed_product_kernel[(triton.cdiv(outputs, tile.rows), triton.cdiv(rows, tile.tokens))](
        x,
        w,
        out,
        rows,
        N=outputs,
        K=inner,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        UPCAST=knobs.runtime.interpret,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def fixed_product_reference(x: torch.Tensor, w: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The eager twin, in float32 up to the final rounding."""
    return (x.float() @ w.float().t()).to(out_dtype or x.dtype)
