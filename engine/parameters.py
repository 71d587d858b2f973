"""A model's tensors, allocated before anything is read, and where each checkpoint tensor goes.

Q, K and V are one tensor, gate and up are one tensor: one GEMM each. `placements` gives, for every checkpoint tensor,
the view of a parameter that it fills, so that loading copies each tensor once and holds no second model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.arch import ArchSpec
from engine.parallel import WHOLE, Mesh, RankShape, Shard, rank_shape


@dataclass(slots=True)
class LayerParameters:
    """One decoder layer. Linear weights are [out, in] in the model's dtype; norms are float32."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None


@dataclass(slots=True)
class ModelParameters:
    embed: torch.Tensor
    layers: list[LayerParameters]
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    """The same tensor as `embed` when tied."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Checkpoint tensor `kind` of `layer` fills `target`; a rank takes its `shard` along `shard_dim`."""

    kind: str
    layer: int
    target: torch.Tensor
    shard: Shard = WHOLE
    shard_dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor."""
        return tuple(
            size * (self.shard.count if dim == self.shard_dim else 1) for dim, size in enumerate(self.target.shape)
        )


def allocate(spec: ArchSpec, dtype: torch.dtype, device: torch.device, mesh: Mesh) -> ModelParameters:
    """Uninitialised parameters of this rank."""
    shape = rank_shape(spec, mesh)
    embed = torch.empty(spec.vocab_rows, spec.hidden, dtype=dtype, device=device)
    return ModelParameters(
        embed=embed,
        layers=[_allocate_layer(spec, shape, dtype, device) for _ in spec.layers],
        final_norm=torch.empty(spec.hidden, dtype=torch.float32, device=device),
        lm_head=embed if spec.tied else torch.empty_like(embed),
    )


def _allocate_layer(spec: ArchSpec, shape: RankShape, dtype: torch.dtype, device: torch.device) -> LayerParameters:
    def weight(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def norm(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    q_size = shape.heads * spec.head_dim
    qkv_size = q_size + 2 * shape.kv_heads * spec.head_dim
    return LayerParameters(
        attention_norm=norm(spec.hidden),
        qkv=weight(qkv_size, spec.hidden),
        qkv_bias=weight(qkv_size) if spec.qkv_bias else None,
        q_norm=norm(spec.head_dim) if spec.qk_norm else None,
        k_norm=norm(spec.head_dim) if spec.qk_norm else None,
        o=weight(spec.hidden, q_size),
        o_bias=weight(spec.hidden) if spec.o_bias else None,
        attention_post_norm=norm(spec.hidden) if spec.sandwich_norms else None,
        mlp_norm=norm(spec.hidden),
        gate_up=weight(2 * shape.intermediate, spec.hidden),
        gate_up_bias=weight(2 * shape.intermediate) if spec.mlp_bias else None,
        down=weight(spec.hidden, shape.intermediate),
        down_bias=weight(spec.hidden) if spec.mlp_bias else None,
        mlp_post_norm=norm(spec.hidden) if spec.sandwich_norms else None,
    )


def placements(spec: ArchSpec, parameters: ModelParameters, mesh: Mesh) -> Iterator[Placement]:
    """Every checkpoint tensor the model needs, in the checkpoint's usual order."""
    yield Placement("embed", 0, parameters.embed)
    shape = rank_shape(spec, mesh)
    for index, layer in enumerate(parameters.layers):
        yield from _norms(index, layer)
        yield from _attention(spec, shape, index, layer)
        yield from _mlp(shape, index, layer)
    yield Placement("final_norm", 0, parameters.final_norm)
    if not spec.tied:
        yield Placement("lm_head", 0, parameters.lm_head)


def _norms(index: int, layer: LayerParameters) -> Iterator[Placement]:
    named = (
        ("attention_norm", layer.attention_norm),
        ("q_norm", layer.q_norm),
        ("k_norm", layer.k_norm),
        ("attention_post_norm", layer.attention_post_norm),
        ("mlp_norm", layer.mlp_norm),
        ("mlp_post_norm", layer.mlp_post_norm),
    )
    for kind, target in named:
        if target is not None:
            yield Placement(kind, index, target)


def _attention(spec: ArchSpec, shape: RankShape, index: int, layer: LayerParameters) -> Iterator[Placement]:
    sizes = [shape.heads * spec.head_dim, shape.kv_heads * spec.head_dim, shape.kv_heads * spec.head_dim]
    shards = (shape.head_shard, shape.kv_shard, shape.kv_shard)
    for name, target, shard in zip("qkv", torch.split(layer.qkv, sizes), shards, strict=True):
        yield Placement(name, index, target, shard)
    if layer.qkv_bias is not None:
        for name, target, shard in zip("qkv", torch.split(layer.qkv_bias, sizes), shards, strict=True):
            yield Placement(f"{name}_bias", index, target, shard)
    yield Placement("o", index, layer.o, shape.head_shard, shard_dim=1)
    if layer.o_bias is not None:
        yield Placement("o_bias", index, layer.o_bias)


def _mlp(shape: RankShape, index: int, layer: LayerParameters) -> Iterator[Placement]:
    gate, up = torch.split(layer.gate_up, shape.intermediate)
    yield Placement("gate", index, gate, shape.mlp_shard)
    yield Placement("up", index, up, shape.mlp_shard)
    yield Placement("down", index, layer.down, shape.mlp_shard, shard_dim=1)
    if layer.gate_up_bias is not None and layer.down_bias is not None:
        gate_bias, up_bias = torch.split(layer.gate_up_bias, shape.intermediate)
        yield Placement("gate_bias", index, gate_bias, shape.mlp_shard)
        yield Placement("up_bias", index, up_bias, shape.mlp_shard)
        yield Placement("down_bias", index, layer.down_bias)
