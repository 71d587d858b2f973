"""The decode forward of a plain llama-shaped model, with everything between the products fused into them.

    batch 1        gemv: norm, rotation, K/V store, residual and SiLU live inside the five products of a layer
    batch 2 .. 16  tensor-core products that stream the weights once; residual and SiLU fused, norms apart
    above          the model's own forward (cuBLAS), see `decode_graphs`

With fp8 weights the first two multiply activations as they are, in bfloat16, with weights that are widened in
registers: half as much is read. The model's own forward rounds activations to fp8 as well.

With programmatic dependent launch a kernel of a step starts while its predecessor drains. Two do not: the first, as the
kernels before it (gather of the batch, attention's work list) write what later kernels read before their waits; and at
batch 1 the output projection, whose weights would get in the way of attention's short reads (step 3.88 ms, not 4.10).
"""

from __future__ import annotations

import torch
from segue_kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from segue_kernels.decode_state import BatchBuffers
from segue_kernels.norm import rms_norm
from segue_kernels.rope_store import rope_store
from segue_kernels.skinny_gemm import gemv, gemv_gated, gemv_rope
from segue_kernels.skinny_gemm_dot import skinny_gated, skinny_linear

from engine.arch import ArchSpec
from engine.cuda.tiles import DecodeTiles
from engine.fp8 import Fp8Weight
from engine.model import DecoderModel
from engine.parameters import LayerParameters

BATCH_MAX = 16
"""Largest batch of the fused products; above it cuBLAS reads the weights as fast."""


def refusal(spec: ArchSpec) -> str | None:
    """Why a model cannot take the fused path, or None."""
    checks = (
        (spec.activation != "silu", f"activation {spec.activation}"),
        (spec.qkv_bias or spec.o_bias or spec.mlp_bias, "biases"),
        (spec.qk_norm, "norms of Q and K"),
        (spec.sandwich_norms, "norms after sub-layers"),
        (spec.windowed, "a sliding window"),
        (len(spec.ropes) > 1, "several rotary tables"),
        (spec.embed_scale != 1.0, "scaled embeddings"),
        (spec.attention_soft_cap is not None or spec.logit_soft_cap is not None, "a soft cap"),
    )
    return next((reason for failed, reason in checks if failed), None)


def stored(weight: torch.Tensor | Fp8Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight as the kernels take it: numbers, and the scales that fp8 numbers have."""
    return (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)


class FusedDecode:
    """Callable: batch -> logits float32 [batch, vocab_rows]. Updates `batch.x` and writes K/V into the pages."""

    def __init__(self, model: DecoderModel, kv_pages: torch.Tensor, tiles: DecodeTiles, *, pdl: bool) -> None:
        reason = refusal(model.spec)
        if reason is not None:
            raise ValueError(f"the fused decode step does not know {reason}")
        self.model = model
        self.spec = model.spec
        self.kv_pages = kv_pages
        self.tiles = tiles
        self.pdl = pdl
        self.query_starts = torch.arange(BATCH_MAX + 1, dtype=torch.int32, device=kv_pages.device)

    def __call__(self, batch: BatchBuffers) -> torch.Tensor:
        size = batch.x.shape[0]
        attention = plan_decode(
            batch.tables,
            batch.seq_lens,
            self.query_starts[: size + 1],
            heads=self.model.heads,
            kv_heads=self.kv_pages.shape[3],
            head_dim=self.spec.head_dim,
            kv_dtype=self.kv_pages.dtype,
        )
        layer_forward = self._single_layer if size == 1 else self._small_layer
        for index, layer in enumerate(self.model.parameters.layers):
            layer_forward(index, layer, batch, attention)
        return self._single_logits(batch.x) if size == 1 else self._small_logits(batch.x)

    def _attend(self, index: int, q: torch.Tensor, attention: DecodePlan) -> torch.Tensor:
        out = torch.empty_like(q)
        decode_attention(attention, index, q, self.kv_pages, out, scale=self.spec.attention_scale, pdl=self.pdl)
        return out.view(q.shape[0], -1)

    def _single_layer(self, index: int, layer: LayerParameters, batch: BatchBuffers, attention: DecodePlan) -> None:
        eps, tiles, pdl = self.spec.norm_eps, self.tiles, self.pdl
        (qkv, qkv_scales), (o, o_scales) = stored(layer.qkv), stored(layer.o)
        (gate_up, gate_up_scales), (down, down_scales) = stored(layer.gate_up), stored(layer.down)
        q = gemv_rope(
            batch.x,
            qkv,
            layer.attention_norm,
            eps,
            batch.rope,
            batch.slots,
            self.kv_pages,
            index,
            self.model.heads,
            scales=qkv_scales,
            tile=tiles.single_qkv,
            pdl=pdl and index > 0,
        )
        attended = self._attend(index, q, attention)
        gemv(attended, o, residual=batch.x, scales=o_scales, tile=tiles.single_o)
        gated = gemv_gated(
            batch.x, gate_up, layer.mlp_norm, eps, scales=gate_up_scales, tile=tiles.single_gate_up, pdl=pdl
        )
        gemv(gated, down, residual=batch.x, scales=down_scales, tile=tiles.single_down, pdl=pdl)

    def _small_layer(self, index: int, layer: LayerParameters, batch: BatchBuffers, attention: DecodePlan) -> None:
        eps, tiles, pdl = self.spec.norm_eps, self.tiles, self.pdl
        (w_qkv, qkv_scales), (o, o_scales) = stored(layer.qkv), stored(layer.o)
        (gate_up, gate_up_scales), (down, down_scales) = stored(layer.gate_up), stored(layer.down)
        normed = rms_norm(batch.x, layer.attention_norm, eps, pdl=pdl and index > 0)
        qkv = skinny_linear(normed, w_qkv, scales=qkv_scales, tile=tiles.small_qkv, pdl=pdl)
        q = rope_store(qkv, batch.rope, batch.slots, self.kv_pages, index, self.model.heads, pdl=pdl)
        attended = self._attend(index, q, attention)
        skinny_linear(attended, o, residual=batch.x, scales=o_scales, tile=tiles.small_o, pdl=pdl)
        normed = rms_norm(batch.x, layer.mlp_norm, eps, pdl=pdl)
        gated = skinny_gated(normed, gate_up, scales=gate_up_scales, tile=tiles.small_gate_up, pdl=pdl)
        skinny_linear(gated, down, residual=batch.x, scales=down_scales, tile=tiles.small_down, pdl=pdl)

    def _logits_buffer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape[0], self.spec.vocab_rows, dtype=torch.float32, device=x.device)

    def _single_logits(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.model.parameters
        logits: torch.Tensor = gemv(
            x,
            parameters.lm_head,
            gain=parameters.final_norm,
            eps=self.spec.norm_eps,
            out=self._logits_buffer(x),
            tile=self.tiles.single_head,
            pdl=self.pdl,
        )
        return logits

    def _small_logits(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.model.parameters
        normed = rms_norm(x, parameters.final_norm, self.spec.norm_eps, pdl=self.pdl)
        out = self._logits_buffer(x)
        skinny_linear(normed, parameters.lm_head, out=out, tile=self.tiles.small_head, pdl=self.pdl)
        return out
