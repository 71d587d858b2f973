"""Gated SiLU of a feed-forward block: y = silu(gate) * up, with silu(z) = z / (1 + exp(-z)) in float32.

Layout: gate_up [rows, 2 * width] holds gate in the first half of each row and up in the second; y [rows, width].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.programmatic_launch import launch_options


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = gate_up_ptr + row * 2 * WIDTH + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False) -> torch.Tensor:
    """[rows, 2 * width] -> [rows, width] of the same dtype."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width) if out is None else out
    if rows == 0:
        return out
    block = min(1024, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl))
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The eager twin."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
