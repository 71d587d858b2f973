"""RMSNorm, with the residual addition before it fused in.

    r = x + residual                              (residual is overwritten with r; without residual r = x)
    y = r / sqrt(mean(r^2) + eps) * gain          statistics and product in float32 (Zhang and Sennrich, 2019)

Layout: x, residual, y [rows, hidden] row-major, gain [hidden]. One program per row, the whole row in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.programmatic_launch import launch_options


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if PDL:
        gdc_launch_dependents()
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + offsets, x.to(residual_ptr.dtype.element_ty), mask=inside)
        # The next layer adds to the stored value, so the statistics are taken of it and not of the exact sum.
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    tl.store(out_ptr + offsets, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """y [rows, hidden] like x; `residual` (same shape) is updated in place to x + residual."""
    rows, hidden = x.shape
    out = torch.empty_like(x) if out is None else out
    if rows == 0:
        return out
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        gain,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(pdl),
    )
    return out


def rms_norm_reference(
    x: torch.Tensor, gain: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The eager twin: same rounding points, same in-place update of `residual`."""
    if residual is not None:
        residual.copy_((x.float() + residual.float()).to(residual.dtype))
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * gain.float()).to(x.dtype)
