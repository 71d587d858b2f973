"""Gate, up and SiLU in one product, against the eager twin, and what it compiles to."""

from __future__ import annotations

import pytest
import torch
from attention_cases import relative_error
from compiling import compile_kernel
from segue_kernels.gated_product import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    GROUP,
    gated_product,
    gated_product_reference,
    refusal,
)


def operands(rows: int, inner: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, inner, device=device).bfloat16()
    return x, (torch.randn(2 * width, inner, device=device) * inner**-0.5).bfloat16()


@pytest.mark.parametrize(("rows", "inner", "width"), [(130, 72, 136), (1, 64, 128), (300, 40, 8)])
def test_edges_of_every_side_equal_the_twin(rows: int, inner: int, width: int, device: torch.device) -> None:
    x, gate_up = operands(rows, inner, width, device)
    assert relative_error(gated_product(x, gate_up), gated_product_reference(x, gate_up)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 2500, 5000])
def test_many_tiles_equal_the_twin(rows: int, device: torch.device) -> None:
    x, gate_up = operands(rows, 4096, 1536, device)
    assert relative_error(gated_product(x, gate_up), gated_product_reference(x, gate_up)) < 5e-3


def test_what_it_does_not_take_is_named(device: torch.device) -> None:
    x, gate_up = operands(1024, 64, 128, device)
    assert refusal(x, gate_up) is None
    assert refusal(x[:1000], gate_up) == "fewer than 1024 rows"
    assert refusal(x.float(), gate_up) == "torch.float32 and torch.bfloat16"
    assert refusal(x[:, ::2], gate_up[:, ::2]) == "not row-major"
    assert refusal(x, gate_up[:20]) == "rows that are no multiple of 16 bytes"


def test_compiles_to_the_widest_product_straight_from_the_copies() -> None:
    report = compile_kernel(
        "segue_kernels.gated_product",
        "gated_product_kernel",
        arch=90,
        signature={
            "x": f"tensordesc<bf16[{BLOCK_M}, {BLOCK_K}]>",
            "gate_up": f"tensordesc<bf16[2, {BLOCK_N}, {BLOCK_K}]>",
            "out": f"tensordesc<bf16[{BLOCK_M}, {BLOCK_N}]>",
            "rows": "i32",
        },
        constexprs={
            "WIDTH": 14336,
            "INNER": 4096,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
            "GROUP": GROUP,
            "UPCAST": False,
        },
        num_warps=8,
        num_stages=4,
    )
    assert report.spill_bytes == 0
    assert report.shared_bytes <= 227 * 1024
    assert report.uses("wgmma.mma_async.sync.aligned.m64n256k16")
    assert not report.uses("ld.shared."), "gate and up of a result must meet in registers"
