"""What a checkpoint reader offers, and the loop that fills parameters from one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from engine.parameters import Placement
from segue.errors import ConfigError


class CheckpointReader(Protocol):
    """An open checkpoint. `tensor_name` translates (kind, layer) of a Placement into the file's own name."""

    source: str

    def tensor_name(self, kind: str, layer: int) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model is expected to use, with its shape as [out, in]."""

    def read(self, name: str, kind: str) -> torch.Tensor:
        """One tensor on the CPU, in whatever floating dtype it is stored or dequantized to."""


def fill(reader: CheckpointReader, wanted: Iterable[Placement], norm_offset: float) -> None:
    """Copy each tensor into its target; ConfigError names the first missing, misshapen or surplus tensor."""
    shapes = reader.shapes()
    for placement in wanted:
        name = reader.tensor_name(placement.kind, placement.layer)
        shape = shapes.pop(name, None)
        if shape is None:
            raise ConfigError(f"{reader.source}: tensor {name} is missing")
        if shape != placement.shape:
            raise ConfigError(f"{reader.source}: tensor {name} has shape {shape}, expected {placement.shape}")
        tensor = reader.read(name, placement.kind)
        size = placement.target.shape[placement.shard_dim]
        part = tensor.narrow(placement.shard_dim, placement.shard.index * size, size)
        placement.target.copy_(part)
        if placement.kind.endswith("norm") and norm_offset:
            placement.target.add_(norm_offset)
    if shapes:
        raise ConfigError(f"{reader.source}: surplus tensor {min(shapes)} ({len(shapes)} in all)")
