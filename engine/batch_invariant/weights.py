"""Linear weights whose product gives a row the same bits in every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch_invariant.row_blocks import RowBlocks, agreeing
from engine.parameters import ModelParameters

LINEAR = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class FixedWeight:
    """Stands where a weight [out, in] stands. `blocks` on a CPU; a GPU has a kernel of one fixed shape."""

    values: torch.Tensor
    blocks: RowBlocks | None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]; the bias is added to the rounded product."""
        out = self._product(x, x.dtype)
        return out if bias is None else out.add_(bias)

    def product_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32; on a GPU not rounded in between."""
        return self._product(x, torch.float32)

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.blocks is not None:
            return self.blocks.product(x, self.values).to(dtype)
        from segue_kernels.fixed_product import fixed_product

        out: torch.Tensor = fixed_product(x.contiguous(), self.values, out_dtype=dtype)
        return out


def fix_products(parameters: ModelParameters) -> None:
    """Replace the linear weights of every layer, and the head. Filled weights only: they are multiplied here."""
    known: dict[torch.Size, RowBlocks] = {}

    def fixed(weight: torch.Tensor) -> FixedWeight:
        if weight.device.type != "cpu":
            return FixedWeight(weight, None)
        if weight.shape not in known:
            known[weight.shape] = agreeing(weight)
        return FixedWeight(weight, known[weight.shape])

    for layer in parameters.layers:
        for name in LINEAR:
            setattr(layer, name, fixed(getattr(layer, name).contiguous()))
    parameters.lm_head = fixed(parameters.lm_head.contiguous())  # type: ignore[assignment]
