"""The pointwise work between GEMMs and attention, as one replaceable object: `TorchOps` runs anywhere, a device may
bring fused kernels with the same meaning. Norms accumulate in float32; results have the dtype of the activations."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.linear import linear


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
        slots int64 [tokens]: page * block_size + offset. One step passes the same `rope` and `slots` objects to all
        its layers.
        """

    def gated_linear(
        self, x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """x [tokens, in], gate_up [2 n, in] -> activation(first half of the product) * second half, [tokens, n]."""


class TorchOps:
    """Plain torch, on any device. Keeps what it derived from the last step's `rope` and `slots`."""

    def __init__(self) -> None:
        self._rotations: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._places: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed: torch.Tensor = (wide * scale).mul_(weight)
        return normed.to(x.dtype)

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
        by_head = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        if qk_norms is not None:
            q_weight, k_weight, eps = qk_norms
            q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
            q.copy_(self.norm(q, q_weight, eps))
            k.copy_(self.norm(k, k_weight, eps))
        cosines, sines = self._rotation(rope, heads + kv_heads, kv_heads)
        swapped = by_head.view(*by_head.shape[:2], 2, -1).flip(-2).view(by_head.shape)
        rotated = (by_head * cosines).addcmul_(swapped, sines).to(qkv.dtype)
        stored = rotated[:, heads:].view(-1, 2, kv_heads, head_dim).to(kv_pages.dtype)
        kv_pages[:, layer].permute(0, 3, 1, 2, 4).index_put_(self._pages_and_offsets(slots, block_size), stored)
        return rotated[:, :heads]

    def gated_linear(
        self, x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self.gated(linear(x, gate_up, bias), activation)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)

    def _rotation(self, rope: torch.Tensor, rotated: int, plain: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors [tokens, heads, dim] of x and of x with its halves swapped: 1 and 0 for V, so that one expression
        serves all of qkv."""
        for source, cosines, sines in self._rotations:
            if source is rope:
                return cosines, sines
        cosine, sine = rope.unsqueeze(1).chunk(2, dim=-1)
        cosines = _by_head(torch.cat((cosine, cosine), dim=-1), rotated, plain, 1.0)
        sines = _by_head(torch.cat((-sine, sine), dim=-1), rotated, plain, 0.0)
        self._rotations = [*self._rotations[-1:], (rope, cosines, sines)]
        return cosines, sines

    def _pages_and_offsets(self, slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._places is None or self._places[0] is not slots:
            self._places = slots, (slots // block_size, slots % block_size)
        return self._places[1]


def _by_head(factors: torch.Tensor, rotated: int, plain: int, neutral: float) -> torch.Tensor:
    """[tokens, 1, dim] for `rotated` heads, then `plain` heads of a neutral factor."""
    tokens, _, dim = factors.shape
    rest = factors.new_full((tokens, plain, dim), neutral)
    return torch.cat((factors.expand(tokens, rotated, dim), rest), dim=1)
