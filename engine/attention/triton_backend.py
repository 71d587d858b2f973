"""Attention by the paged Triton kernels: decode, prefill and mixed batches, in CUDA graphs too.

Rows of few queries go to the split-KV decode kernel, the others to the prefill kernel; which row is which is decided
on the device from the lengths, so that nothing is read back and a captured step stays right while lengths change.
The decode work list depends on the window, so it is made at the first layer that has a window and shared from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from segue_kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from segue_kernels.prefill_attention import QUERIES_UNBOUNDED, PrefillPlan, plan_prefill, prefill_attention
from triton import knobs

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape

PACKED_ROWS = 16
"""Rows of the smallest tensor-core tile: heads of a group times queries fill it at no extra cost."""


@dataclass(slots=True)
class TritonPlan:
    """One step. `short`: the most queries of a row that the decode kernel serves."""

    batch: AttentionBatch
    short: int
    prefill: PrefillPlan | None
    has_short_rows: bool
    decode: dict[int | None, DecodePlan] = field(default_factory=dict)
    """By window."""


class TritonBackend:
    name = "triton"
    capabilities = AttentionCapabilities(
        devices=("cuda", "cpu") if knobs.runtime.interpret else ("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        graph_capture=True,
    )

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.short = max(1, PACKED_ROWS // (shape.heads // shape.kv_heads))

    def plan(self, batch: AttentionBatch, *, queries_below: int = QUERIES_UNBOUNDED) -> TritonPlan:
        """Rows with `queries_below` queries or more are left to the caller."""
        if batch.decode_only:
            return TritonPlan(batch, 1, None, True)
        counts = query_counts(batch)
        has_long = batch.max_query > self.short
        has_short = counts is None or any(count <= self.short for count in counts)
        if has_long and counts is not None:
            has_long = any(self.short < count < queries_below for count in counts)
        return TritonPlan(
            batch, self.short, self._plan_prefill(batch, counts, queries_below) if has_long else None, has_short
        )

    def _plan_prefill(self, batch: AttentionBatch, counts: tuple[int, ...] | None, queries_below: int) -> PrefillPlan:
        return plan_prefill(
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            head_dim=self.shape.head_dim,
            q_dtype=self.shape.dtype,
            max_query=batch.max_query,
            queries_above=self.short,
            queries_below=queries_below,
            query_counts=counts,
        )

    def forward(
        self,
        plan: TritonPlan,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        kv_scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the protocol says; fp8 pages need `kv_scales` float32 [layers, 2, kv_heads]. `out` receives the result."""
        out = torch.empty_like(q) if out is None else out
        if plan.has_short_rows:
            decode = self._decode_plan(plan, window, kv_pages.dtype)
            decode_attention(decode, layer, q, kv_pages, out, scale=scale, soft_cap=soft_cap, kv_scales=kv_scales)
        if plan.prefill is not None:
            prefill_attention(
                plan.prefill,
                layer,
                q,
                kv_pages,
                out,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                kv_scales=kv_scales,
            )
        return out

    def _decode_plan(self, plan: TritonPlan, window: int | None, kv_dtype: torch.dtype) -> DecodePlan:
        if window not in plan.decode:
            plan.decode[window] = plan_decode(
                plan.batch.block_tables,
                plan.batch.seq_lens,
                plan.batch.query_starts,
                heads=self.shape.heads,
                kv_heads=self.shape.kv_heads,
                head_dim=self.shape.head_dim,
                kv_dtype=kv_dtype,
                queries_max=plan.short,
                window=window,
            )
        return plan.decode[window]


def query_counts(batch: AttentionBatch) -> tuple[int, ...] | None:
    """Queries of each row where the host knows them."""
    starts = batch.query_starts_host
    return None if starts is None else tuple(b - a for a, b in pairwise(starts))
