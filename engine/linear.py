"""Linear layers, in the form that the device's BLAS does best."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.batch_invariant.weights import FixedWeight
from engine.fp8 import Fp8Weight

WIDE_OUT, FEW_TOKENS = 2048, 16
"""Head of SmolLM2 (49152 x 576) in float32 on one AVX2 core, ms, x W^T / W x^T: 53/32 at 2 tokens, 96/36 at 4, 79/50 at
8, 155/89 at 16, 95/156 at 32. Below 2048 outputs the two are equal."""


MANY_TOKENS = 128
"""From here oneDNN's product is faster than the BLAS's: 512 tokens, float32, one AVX2 core, ms, BLAS / oneDNN:
57.6/52.7 (576 -> 3072), 30.4/26.6 (1536 -> 576), 18.6/15.8 (576 -> 960). Not so for transposed weights: 58/94."""

_HAS_ONEDNN: bool = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


Weight = torch.Tensor | Fp8Weight | FixedWeight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, in], weight [out, in] -> contiguous [tokens, out]."""
    if not isinstance(weight, torch.Tensor):
        return weight.product(x, bias)
    tokens, wide = x.shape[0], weight.shape[0] >= WIDE_OUT
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if _HAS_ONEDNN and tokens >= MANY_TOKENS and weight.is_contiguous():
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    if wide and weight.is_contiguous() and 2 <= tokens <= FEW_TOKENS:
        out = torch.mm(weight, x.t()).t().contiguous()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


def linear_float32(x: torch.Tensor, weight: torch.Tensor | FixedWeight) -> torch.Tensor:
    """`linear` without a bias, in float32; on a GPU straight from the accumulators, without a rounded copy between."""
    if isinstance(weight, FixedWeight):
        return weight.product_float32(x)
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: Weight) -> None:
    """residual [tokens, out] += x W^T, within the product: one rounding, and a pass over memory less than apart."""
    if not isinstance(weight, torch.Tensor):
        residual.add_(weight.product(x))
    else:
        residual.addmm_(x, weight.t())
