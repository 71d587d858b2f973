"""Attention for small prefill chunks in a captured graph: rows of a few queries each, by the split-KV decode kernel.

A chunk of 128 queries on a long cached prefix would give the prefill kernel too few programs to fill a GPU. The caller
cuts chunks into slices of at most `slice_queries`, each a row with its own length and block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from segue_kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from segue_kernels.programmatic_launch import supports_pdl

from engine.attention.base import AttentionBatch, AttentionCapabilities

SLICE_ROWS = 64
"""Queries of a slice times query heads of a kv-head: one warp-group's matrix instruction."""


def slice_queries(heads: int, kv_heads: int) -> int:
    """Most queries of a slice: with the query heads of one kv-head they fill one tile of the kernel."""
    return max(1, SLICE_ROWS // (heads // kv_heads))


@dataclass(slots=True)
class SlicePlan:
    batch: AttentionBatch
    by_window: dict[int | None, DecodePlan] = field(default_factory=dict)
    out: torch.Tensor | None = None
    """Every layer's result in turn. No row owns padding tokens: theirs stays zero, as old memory may hold anything."""


class SliceAttention:
    """An attention backend for rows of at most `slice_queries` queries."""

    name = "slices"
    capabilities = AttentionCapabilities(
        devices=("cuda", "cpu"), dtypes=(torch.float32, torch.bfloat16, torch.float16), graph_capture=True
    )

    def __init__(self, heads: int, kv_heads: int) -> None:
        self._heads, self._kv_heads = heads, kv_heads

    def plan(self, batch: AttentionBatch) -> SlicePlan:
        return SlicePlan(batch)

    def forward(
        self,
        plan: SlicePlan,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        planned = window in plan.by_window
        if not planned:
            plan.by_window[window] = plan_decode(
                plan.batch.block_tables,
                plan.batch.seq_lens,
                plan.batch.query_starts,
                heads=self._heads,
                kv_heads=self._kv_heads,
                head_dim=q.shape[-1],
                kv_dtype=kv_pages.dtype,
                queries_max=slice_queries(self._heads, self._kv_heads),
                window=window,
            )
        if plan.out is None:
            plan.out = torch.zeros_like(q)
        pdl = planned and supports_pdl(q.device)  # links of a PDL chain read the work list before they wait
        decode_attention(plan.by_window[window], layer, q, kv_pages, plan.out, scale=scale, soft_cap=soft_cap, pdl=pdl)
        return plan.out if out is None else out.copy_(plan.out)
