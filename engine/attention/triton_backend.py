"""Attention by the paged Triton kernels: decode, prefill and mixed batches, in CUDA graphs too.

Rows of few queries go to the split-KV decode kernel, the others to the prefill kernel; which row is which is decided
on the device from the lengths, so that nothing is read back and a captured step stays right while lengths change.
The decode work list depends on the window, so it is made at the first layer that has a window and shared from there.

Where the host knows the lengths and the prefill kernel would leave most of the GPU idle (128 new tokens on a long
cached prefix), its rows are cut into *slices* of a few queries each, which are rows of their own to the decode kernel:
their keys are split over the whole GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from segue_kernels.attention_plan import processor_count
from segue_kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from segue_kernels.prefill_attention import (
    QUERIES_UNBOUNDED,
    PrefillPlan,
    plan_prefill,
    prefill_attention,
    prefill_tiling,
)
from segue_kernels.programmatic_launch import supports_pdl
from triton import knobs

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape
from engine.upload import upload

PACKED_ROWS = 16
"""Rows of the smallest tensor-core tile: heads of a group times queries fill it at no extra cost."""

SLICE_ROWS = 64
"""The same product for slices: one warp-group's matrix instruction."""

PREFILL_PROGRAMS_PER_SM = 2
"""Programs of the prefill kernel that one multiprocessor runs at a time."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """Rows as the kernels see them: block_tables int32 [rows, blocks], seq_lens [rows], query_starts [rows + 1]."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor


@dataclass(slots=True)
class TritonPlan:
    """One step. `short`: the most queries of a row that the decode kernel serves."""

    batch: AttentionBatch
    short: int
    has_short_rows: bool
    prefill: PrefillPlan | None = None
    slices: RowTables | None = None
    """All rows, the long ones cut into slices; instead of `prefill`."""
    decode: dict[int | None, DecodePlan] = field(default_factory=dict)
    decode_slices: dict[int | None, DecodePlan] = field(default_factory=dict)
    """By window."""

    def is_planned(self, window: int | None) -> bool:
        """Whether an earlier layer made the decode kernel's work lists for this window."""
        return window in (self.decode if self.has_short_rows else self.decode_slices)


class TritonBackend:
    name = "triton"
    capabilities = AttentionCapabilities(
        devices=("cuda", "cpu") if knobs.runtime.interpret else ("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        graph_capture=True,
    )

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        group = shape.heads // shape.kv_heads
        self.short = max(1, PACKED_ROWS // group)
        self.slice = max(1, SLICE_ROWS // group)
        self.pdl = supports_pdl(shape.device)

    def plan(self, batch: AttentionBatch, *, queries_below: int = QUERIES_UNBOUNDED) -> TritonPlan:
        """Rows with `queries_below` queries or more are left to the caller."""
        if batch.decode_only:
            return TritonPlan(batch, 1, has_short_rows=True)
        counts = query_counts(batch)
        if counts is None:
            plan = TritonPlan(batch, self.short, has_short_rows=True)
            if batch.max_query > self.short:
                plan.prefill = self._plan_prefill(batch, None, queries_below)
            return plan
        plan = TritonPlan(batch, self.short, has_short_rows=min(counts) <= self.short)
        long = [count for count in counts if self.short < count < queries_below]
        if long and self._leaves_idle(long):
            plan.slices = cut_rows(batch, slice_counts(counts, self.short, self.slice, queries_below))
        elif long:
            plan.prefill = self._plan_prefill(batch, counts, queries_below)
        return plan

    def _leaves_idle(self, counts: list[int]) -> bool:
        """Whether the prefill kernel's programs for such rows are fewer than the GPU runs at a time."""
        block_m = prefill_tiling(self.shape.head_dim, self.shape.dtype).block_m
        programs: int = sum(-(-count // block_m) for count in counts) * self.shape.heads
        slots: int = PREFILL_PROGRAMS_PER_SM * processor_count(self.shape.device)
        return programs < slots

    def _plan_prefill(self, batch: AttentionBatch, counts: tuple[int, ...] | None, queries_below: int) -> PrefillPlan:
        return plan_prefill(
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            head_dim=self.shape.head_dim,
            q_dtype=self.shape.dtype,
            max_query=batch.max_query,
            max_tokens=batch.max_tokens,
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
        decode_plans, planned = [], plan.is_planned(window)
        if plan.has_short_rows:
            decode_plans.append(self._short_rows(plan, window, kv_pages.dtype))
        if plan.slices is not None:
            decode_plans.append(self._slices(plan, plan.slices, window, kv_pages.dtype))
        for decode in decode_plans:
            decode_attention(
                decode,
                layer,
                q,
                kv_pages,
                out,
                scale=scale,
                soft_cap=soft_cap,
                kv_scales=kv_scales,
                pdl=self.pdl and planned,  # links of a PDL chain read the work list before they wait
            )
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
                pdl=self.pdl,
            )
        return out

    def _short_rows(self, plan: TritonPlan, window: int | None, kv_dtype: torch.dtype) -> DecodePlan:
        if window not in plan.decode:
            batch = plan.batch
            rows = RowTables(batch.block_tables, batch.seq_lens, batch.query_starts)
            plan.decode[window] = self._plan_decode(rows, 0, plan.short, window, kv_dtype)
        return plan.decode[window]

    def _slices(self, plan: TritonPlan, rows: RowTables, window: int | None, kv_dtype: torch.dtype) -> DecodePlan:
        if window not in plan.decode_slices:
            plan.decode_slices[window] = self._plan_decode(rows, plan.short, self.slice, window, kv_dtype)
        return plan.decode_slices[window]

    def _plan_decode(
        self, rows: RowTables, queries_above: int, queries_max: int, window: int | None, kv_dtype: torch.dtype
    ) -> DecodePlan:
        return plan_decode(
            rows.block_tables,
            rows.seq_lens,
            rows.query_starts,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            kv_dtype=kv_dtype,
            queries_above=queries_above,
            queries_max=queries_max,
            window=window,
        )


def slice_counts(counts: Sequence[int], short: int, slice_max: int, queries_below: int) -> list[list[int]]:
    """Cut each row with short < queries < queries_below into even slices of at most `slice_max` queries.

    Even slices of a row that needs several have at least slice_max / 2 > short queries, so none passes for a short row.
    """
    slices = []
    for count in counts:
        parts = -(-count // slice_max) if short < count < queries_below else 1
        slices.append([count * (part + 1) // parts - count * part // parts for part in range(parts)])
    return slices


def cut_rows(batch: AttentionBatch, slices: list[list[int]]) -> RowTables:
    """The batch with every row replaced by its slices; a slice sees the keys up to its own last query.

    What the host knows goes to the device in one transfer, without a wait.
    """
    device = batch.seq_lens.device
    rows = [row for row, parts in enumerate(slices) for _ in parts]
    hidden = [sum(parts[index + 1 :]) for parts in slices for index in range(len(parts))]
    starts = [0, *accumulate(count for parts in slices for count in parts)]
    count = len(rows)
    packed = upload([*starts, *rows, *hidden], device, np.int32)  # starts first: kernels get them aligned
    index = packed[count + 1 : 2 * count + 1].long()
    lens = batch.seq_lens[index] - packed[2 * count + 1 :]
    return RowTables(batch.block_tables[index], lens, packed[: count + 1])


def query_counts(batch: AttentionBatch) -> tuple[int, ...] | None:
    """Queries of each row where the host knows them."""
    starts = batch.query_starts_host
    return None if starts is None else tuple(b - a for a, b in pairwise(starts))
