"""How one rank sees its tensor-parallel group. Layers get this in their constructors; there is no global.

Attention splits by kv-head (replicated when there are more ranks than kv-heads), the MLP by its intermediate size.
`o` and `down` give partial sums, which `all_reduce` completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.arch import ArchSpec
from segue.errors import ConfigError


class Collectives(Protocol):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns the tensor."""


class NullCollectives:
    """A group of one."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal parts along one dimension."""

    index: int
    count: int


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class RankShape:
    """This rank's share of a model's heads and MLP."""

    heads: int
    kv_heads: int
    intermediate: int
    head_shard: Shard
    kv_shard: Shard
    mlp_shard: Shard


def rank_shape(spec: ArchSpec, mesh: Mesh) -> RankShape:
    """Divide `spec` over the mesh; ConfigError when it does not divide."""
    if spec.heads % mesh.size or spec.intermediate % mesh.size:
        raise ConfigError(f"{spec.heads} heads and MLP {spec.intermediate} do not divide over {mesh.size} ranks")
    if max(spec.kv_heads, mesh.size) % min(spec.kv_heads, mesh.size):
        raise ConfigError(f"{spec.kv_heads} kv-heads do not divide over {mesh.size} ranks")
    kv_parts = min(spec.kv_heads, mesh.size)
    return RankShape(
        heads=spec.heads // mesh.size,
        kv_heads=spec.kv_heads // kv_parts,
        intermediate=spec.intermediate // mesh.size,
        head_shard=Shard(mesh.rank, mesh.size),
        kv_shard=Shard(mesh.rank * kv_parts // mesh.size, kv_parts),
        mlp_shard=Shard(mesh.rank, mesh.size),
    )
