"""`LayerOps` on a CPU for batch-invariant engines.

Additions, products and roots are rounded correctly wherever they are computed. Exponentials are not: torch computes the
last elements of a thread's share with the scalar function, which may round otherwise than the vector one. A share that
is one whole piece of memory, or begins in the middle of a row, makes that depend on the neighbours; pieces small enough
for one thread, walked row by row, do not.
"""

from __future__ import annotations

import torch

from engine.layer_ops import TorchOps
from engine.linear import linear

ELEMENTS_SERIAL = 32768
"""Of one operation that torch leaves to one thread."""


class RowwiseOps:
    """As `TorchOps`."""

    def __init__(self) -> None:
        self._plain = TorchOps()
        self.norm = self._plain.norm
        self.add_norm = self._plain.add_norm
        self.rotate_and_store = self._plain.rotate_and_store

    def gated_linear(
        self, x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        product = linear(x, gate_up, bias)
        rows = max(1, ELEMENTS_SERIAL // product.shape[1])
        return torch.cat([self._plain.gated(block, activation) for block in torch.split(product, rows)])
