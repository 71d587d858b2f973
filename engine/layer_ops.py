"""The pointwise work between GEMMs and attention, as one replaceable object: `TorchOps` runs anywhere, a device may
bring fused kernels with the same meaning. Norms accumulate in float32; results have the dtype of the activations."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.rope import apply_rope


class LayerOps(Protocol):
    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension (Zhang and Sennrich 2019); weight float32."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); either argument may be overwritten."""

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
        """Norm (where given) and rotate Q and K, write K and V into their pages; returns q [tokens, heads, dim].

        qkv [tokens, (heads + 2 kv_heads) * dim], may be overwritten; rope float32 [tokens, dim]: cosines, sines;
        slots int64 [tokens]: page * block_size + offset.
        """

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """[tokens, 2 n] -> activation(first half) * second half, [tokens, n]."""


class TorchOps:
    """Plain torch, on any device."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.add_(x)
        return self.norm(residual, weight, eps), residual

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
        kv_heads, block_size, head_dim = kv_pages.shape[3:]
        by_head = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
        if qk_norms is not None:
            q_weight, k_weight, eps = qk_norms
            q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
            q.copy_(self.norm(q, q_weight, eps))
            k.copy_(self.norm(k, k_weight, eps))
        cosines, sines = rope.unsqueeze(1).chunk(2, dim=-1)
        apply_rope(by_head[:, : heads + kv_heads], cosines, sines)
        stored = by_head[:, heads:].view(-1, 2, kv_heads, head_dim).to(kv_pages.dtype)
        pages, offsets = slots // block_size, slots % block_size
        kv_pages[:, layer].permute(0, 3, 1, 2, 4).index_put_((pages, offsets), stored)
        return by_head[:, :heads]

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
