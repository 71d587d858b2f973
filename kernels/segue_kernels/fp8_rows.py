"""Rows of activations to fp8 (e4m3), each with a scale of its own, as row-wise scaled products want them.

    scale_m = max_k |x_mk| / 448,   q_mk = x_mk / scale_m rounded to e4m3        (448 is e4m3's largest; a row of zeros
                                                                                  has scale 1)

x [M, K] -> q float8_e4m3fn [M, K], scales float32 [M, 1]. One program for each row. Floor: 3 bytes for each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_MAX = 448.0


@triton.jit
def quantize_rows_kernel(x_ptr, q_ptr, scales_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    largest: tl.constexpr = 448.0
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    scale = tl.where(peak > 0, peak / largest, 1.0)
    # By rounding of the division x / scale may pass the largest by a little.
    scaled = tl.minimum(tl.maximum(x / scale, -largest), largest)
    tl.store(q_ptr + row * K + column, scaled.to(q_ptr.dtype.element_ty), mask=column < K)
    tl.store(scales_ptr + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] contiguous, any float dtype; see the module."""
    rows, columns = x.shape
    assert x.is_contiguous()
    q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    quantize_rows_kernel[(rows,)](x, q, scales, K=columns, BLOCK=block, num_warps=min(16, max(1, block // 1024)))
    return q, scales


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager twin; also what weights are quantised with (a row is an output channel)."""
    peaks = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    return (x.float() / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales
