"""Gate, up and their gated SiLU as one product of many rows: y = silu(x W_gate^T) * (x W_up^T).

Layout: x [rows, inner], gate_up [2 * width, inner] with gate in the first half, y [rows, width], all row-major bf16.

One tile of the tensor cores holds BLOCK_N columns of gate and the same columns of up side by side: seen as
[2, width, inner], gate_up gives both in one copy, and the accumulator holds both numbers of a result in one thread. So
the product runs as one of twice the width, and what it would write and read again, 4 * rows * width bytes each way,
never leaves the registers. Copies go by tensor descriptor, which fill with zeros and clip at the edges.

Floor: 4 * rows * inner * width FLOPs over the tensor-core rate. On an H200 that stays at its power limit, 8B shape, us,
against cuBLAS and `silu_mul` in the same run: 1,024 rows 367 / 384, 2,560 827 / 881, 4,096 1443 / 1521, 16,384 5620 /
5891.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from segue_kernels.attention_plan import processor_count

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
GROUP = 16
"""Row blocks that share the weights in the L2."""

ROWS_MIN = 1024
"""Fewer rows make too few tiles; there the product apart is as fast."""


@triton.jit(do_not_specialize=["rows"])
def gated_product_kernel(
    x,
    gate_up,
    out,
    rows,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(WIDTH, BLOCK_N)
    for tile in range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0)):
        # Walk down GROUP row blocks before going on to the next columns.
        first = tile // (GROUP * blocks_n) * GROUP
        size = tl.minimum(blocks_m - first, GROUP)
        within = tile % (GROUP * blocks_n)
        row = (first + within % size) * BLOCK_M
        column = within // size * BLOCK_N
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, INNER, BLOCK_K):
            weights = gate_up.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            values = x.load([row, k])
            if UPCAST:
                values, weights = values.to(tl.float32), weights.to(tl.float32)
            both = tl.dot(values, weights.T, both, input_precision="ieee")
        gate, up = tl.split(both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        out.store([row, column], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))


def refusal(x: torch.Tensor, gate_up: torch.Tensor) -> str | None:
    """Why the kernel cannot or should not compute this product, or None."""
    checks = (
        (x.shape[0] < ROWS_MIN, f"fewer than {ROWS_MIN} rows"),
        (x.dtype != torch.bfloat16 or gate_up.dtype != torch.bfloat16, f"{x.dtype} and {gate_up.dtype}"),
        (not (x.is_contiguous() and gate_up.is_contiguous()), "not row-major"),
        (x.shape[1] % 8 != 0 or gate_up.shape[0] % 16 != 0, "rows that are no multiple of 16 bytes"),
        (x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] < 9, "compute capability below 9.0"),
    )
    return next((reason for failed, reason in checks if failed), None)


def gated_product(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, inner], [2 * width, inner] -> [rows, width]; see `refusal` for what it takes."""
    rows, inner = x.shape
    width = gate_up.shape[0] // 2
    out = x.new_empty(rows, width)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(width, BLOCK_N)
    gated_product_kernel[(min(tiles, processor_count(x.device)),)](
        TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(gate_up.view(2, width, inner), [2, BLOCK_N, BLOCK_K]),
        TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N]),
        rows,
        WIDTH=width,
        INNER=inner,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP=GROUP,
        UPCAST=knobs.runtime.interpret,
        num_warps=8,
        num_stages=4,
    )
    return out


def gated_product_reference(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The eager twin, in float32."""
    gate, up = (x.float() @ gate_up.float().t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
