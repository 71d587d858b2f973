"""The fused layer operations against the plain ones."""

from __future__ import annotations

import pytest
import torch
from segue_kernels import gated_product

from engine.cuda import layer_ops
from engine.cuda.layer_ops import FusedOps
from engine.layer_ops import TorchOps


@pytest.mark.parametrize("rows", [3, gated_product.ROWS_MIN])
def test_gated_products_of_few_and_of_many_rows_equal_the_plain_ones(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    x, gate_up = (torch.randn(size, 64, device=device).bfloat16() for size in (rows, 32))
    calls = []

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        calls.append(operands)
        return gated_product.gated_product(*operands)

    monkeypatch.setattr(layer_ops, "gated_product", counted)
    out = FusedOps().gated_linear(x, gate_up, None, "silu")
    expected = TorchOps().gated_linear(x.float(), gate_up.float(), None, "silu")
    assert ((out.float() - expected).norm() / expected.norm()) < 1e-2
    assert len(calls) == int(rows >= gated_product.ROWS_MIN)
