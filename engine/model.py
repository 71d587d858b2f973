"""One decoder for every ArchSpec. Prefill chunks and decodes of a step are one ragged batch [tokens, hidden]: all
prefill tokens first, then one token for each decoding row, so that every GEMM runs once over both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.arch import ArchSpec
from engine.attention.base import AttentionBackend, AttentionBatch
from engine.layer_ops import LayerOps
from engine.linear import add_linear, linear, linear_float32
from engine.parallel import Collectives, Mesh, NullCollectives, rank_shape
from engine.parameters import LayerParameters, ModelParameters
from engine.rope import rope_table


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's batch, on the model's device. `prefill` describes tokens 0 .. prefill_tokens-1, `decode` the rest."""

    token_ids: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [tokens]"""
    slots: torch.Tensor
    """int64 [tokens]: page * block_size + offset, where the token's K/V goes."""
    prefill: AttentionBatch | None
    decode: AttentionBatch | None
    prefill_tokens: int
    sampled: torch.Tensor | None
    """int64 [samples]: tokens whose logits are wanted; None: all, in order."""


class DecoderModel:
    """Holds parameters and RoPE tables; `forward` is a pure function of them, the step and the pages it updates."""

    def __init__(
        self,
        spec: ArchSpec,
        parameters: ModelParameters,
        prefill_backend: AttentionBackend,
        decode_backend: AttentionBackend,
        ops: LayerOps,
        *,
        positions_max: int,
        mesh: Mesh | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        self.prefill_backend = prefill_backend
        self.decode_backend = decode_backend
        self.ops = ops
        self.collectives = collectives or NullCollectives()
        self.heads = rank_shape(spec, mesh or Mesh()).heads
        device = parameters.embed.device
        self.ropes = [rope_table(rope, spec.head_dim, positions_max, device) for rope in spec.ropes]
        self.adds_in_product = device.type == "cuda" and collectives is None
        """Residuals are added inside products; partial sums of a group must not be, and a CPU gains nothing."""
        self.embed_scale = torch.tensor(spec.embed_scale).to(parameters.embed.dtype).item()

    def forward(self, step: StepInput, kv_pages: torch.Tensor) -> torch.Tensor:
        """Logits float32 [samples, vocab_rows]. K/V of the step's tokens are written into `kv_pages`."""
        hidden = self.hidden_states(step, kv_pages)
        return self.logits(hidden if step.sampled is None else hidden[step.sampled])

    def hidden_states(self, step: StepInput, kv_pages: torch.Tensor) -> torch.Tensor:
        """Output of the last layer before the final norm: [tokens, hidden]."""
        residual = F.embedding(step.token_ids, self.parameters.embed)
        if self.embed_scale != 1.0:
            residual = residual * self.embed_scale
        ropes = [table[step.positions] for table in self.ropes]
        plans = (
            None if step.prefill is None else self.prefill_backend.plan(step.prefill),
            None if step.decode is None else self.decode_backend.plan(step.decode),
        )
        pending: torch.Tensor | None = None
        for index, layer in enumerate(self.parameters.layers):
            normed, residual = self._enter(pending, residual, layer.attention_norm)
            attended = self._attention(index, layer, normed, ropes, step, plans, kv_pages)
            pending = self._leave(attended, layer.o, layer.o_bias, layer.attention_post_norm, residual)
            normed, residual = self._enter(pending, residual, layer.mlp_norm)
            gated = self.ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias, self.spec.activation)
            pending = self._leave(gated, layer.down, layer.down_bias, layer.mlp_post_norm, residual)
        return residual if pending is None else residual.add_(pending)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [rows, hidden] -> float32 [rows, vocab_rows]."""
        normed = self.ops.norm(hidden, self.parameters.final_norm, self.spec.norm_eps)
        logits = linear_float32(normed, self.parameters.lm_head)
        cap = self.spec.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _enter(
        self, pending: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the previous sub-layer's output to the residual stream and norm it for the next."""
        if pending is None:
            return self.ops.norm(residual, weight, self.spec.norm_eps), residual
        return self.ops.add_norm(pending, residual, weight, self.spec.norm_eps)

    def _leave(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        post_norm: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor | None:
        """A sub-layer's last product: what it adds to the residual stream, or None where it is added already."""
        if self.adds_in_product and bias is None and post_norm is None:
            add_linear(residual, x, weight)
            return None
        out = self._reduced(x, weight, bias)
        return out if post_norm is None else self.ops.norm(out, post_norm, self.spec.norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerParameters,
        normed: torch.Tensor,
        ropes: list[torch.Tensor],
        step: StepInput,
        plans: tuple[Any, Any],
        kv_pages: torch.Tensor,
    ) -> torch.Tensor:
        kind = self.spec.layers[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, self.spec.norm_eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        q = self.ops.rotate_and_store(qkv, ropes[kind.rope], norms, kv_pages, index, step.slots, self.heads)
        split = step.prefill_tokens
        both = torch.empty_like(q) if plans[0] is not None and plans[1] is not None else None
        attended = q
        for backend, plan, span in (
            (self.prefill_backend, plans[0], slice(0, split)),
            (self.decode_backend, plans[1], slice(split, None)),
        ):
            if plan is not None:
                attended = backend.forward(
                    plan,
                    index,
                    q[span],
                    kv_pages,
                    scale=self.spec.attention_scale,
                    window=kind.window,
                    soft_cap=self.spec.attention_soft_cap,
                    out=None if both is None else both[span],
                )
        attended = attended if both is None else both
        return attended.reshape(attended.shape[0], -1)

    def _reduced(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A row-parallel linear layer: partial sums are completed over the group before the bias is added."""
        out = self.collectives.all_reduce(linear(x, weight))
        return out if bias is None else out.add_(bias)
