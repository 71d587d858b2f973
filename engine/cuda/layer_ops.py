"""`LayerOps` with fused kernels: one pass over memory for each norm, rotation + K/V store, and gated activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from segue_kernels.activation import silu_mul
from segue_kernels.gated_product import gated_product, refusal
from segue_kernels.norm import rms_norm
from segue_kernels.rope_store import rope_store

from engine.layer_ops import TorchOps
from engine.linear import linear


class FusedOps:
    """Same meaning as `TorchOps`. Activations other than SiLU, and norms of Q and K, go through it.

    `pdl`: launch the kernels so that they start while their predecessor drains (see `programmatic_launch`)."""

    def __init__(self, *, pdl: bool = False) -> None:
        self._plain = TorchOps()
        self._pdl = pdl

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = rms_norm(x, weight, eps, pdl=self._pdl)
        return normed

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, weight, eps, residual=residual, pdl=self._pdl), residual

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rope: torch.Tensor,
        qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        kv_pages: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
        heads: int,
    ) -> torch.Tensor:
        kv_heads, head_dim = kv_pages.shape[3], kv_pages.shape[5]
        if qk_norms is not None:
            q_weight, k_weight, eps = qk_norms
            by_head = qkv.view(qkv.shape[0], -1, head_dim)
            q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
            q.copy_(F.rms_norm(q.float(), (head_dim,), q_weight, eps))
            k.copy_(F.rms_norm(k.float(), (head_dim,), k_weight, eps))
        q_rotated: torch.Tensor = rope_store(qkv, rope, slots, kv_pages, layer, heads, pdl=self._pdl)
        return q_rotated

    def gated_linear(
        self, x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        if activation != "silu":
            return self._plain.gated_linear(x, gate_up, bias, activation)
        fused: torch.Tensor
        if bias is None and isinstance(gate_up, torch.Tensor) and refusal(x, gate_up) is None:
            fused = gated_product(x, gate_up)
        else:
            fused = silu_mul(linear(x, gate_up, bias), pdl=self._pdl)
        return fused
