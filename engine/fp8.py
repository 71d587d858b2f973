"""Linear layers in fp8: weights e4m3 with a scale for each output channel, activations with one for each token (W8A8).

    y_mn = s_m t_n sum_k q_mk w_nk  + b_n         accumulated in float32 by the tensor cores, rounded once

So in chunks and large batches; decode steps of few rows keep activations in bfloat16 (`cuda/fused_decode.py`).
Embedding, norms, head and attention stay in the model's dtype. The checkpoint is read in that dtype and quantised layer
by layer, so that one layer exists twice for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.parameters import LayerParameters, ModelParameters
from segue.errors import ConfigError

QUANTISED = ("qkv", "o", "gate_up", "down")
MULTIPLE = 16
"""Both sides of a weight: what row-wise scaled products take."""

COMPUTE_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Stands where a weight [out, in] stands."""

    values: torch.Tensor
    """float8_e4m3fn [out, in]"""
    scales: torch.Tensor
    """float32 [1, out]"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] in bfloat16 -> [tokens, out] in bfloat16."""
        from segue_kernels.fp8_rows import quantize_rows

        q, scales = quantize_rows(x.contiguous())
        out: torch.Tensor = torch._scaled_mm(
            q,
            self.values.t(),
            scale_a=scales,
            scale_b=self.scales,
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out


def check_fp8(quantization: str, dtype: torch.dtype, device: torch.device, layer: LayerParameters | None) -> None:
    """ConfigError, naming what would work, for a model or device that has no row-wise scaled products."""
    if quantization != "fp8":
        raise ConfigError(f"quantization {quantization!r} is not supported; known: none, fp8")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < COMPUTE_CAPABILITY:
        raise ConfigError("quantization fp8 needs a GPU of compute capability 9.0; leave it out on this device")
    if dtype != torch.bfloat16:
        raise ConfigError(f"quantization fp8 goes with dtype bfloat16, not {dtype}".replace("torch.", ""))
    for name in QUANTISED if layer is not None else ():
        shape = getattr(layer, name).shape
        if shape[0] % MULTIPLE or shape[1] % MULTIPLE:
            raise ConfigError(f"quantization fp8: {name} of {shape[0]} x {shape[1]} is no multiple of {MULTIPLE}")


def quantize(parameters: ModelParameters) -> None:
    """Replace the linear weights of every layer."""
    for layer in parameters.layers:
        for name in QUANTISED:
            setattr(layer, name, fp8_weight(getattr(layer, name)))


def fp8_weight(weight: torch.Tensor) -> Fp8Weight:
    from segue_kernels.fp8_rows import quantize_rows

    values, scales = quantize_rows(weight.contiguous())
    return Fp8Weight(values, scales.t().contiguous())
