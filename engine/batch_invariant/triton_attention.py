"""Attention by one Triton kernel for chunks and decodes alike, for batch-invariant engines.

All queries go to the split-KV decode kernel. Chunks are cut at multiples of `queries` positions, so that the queries of
a slice look at the same tiles of keys, and keys are cut at multiples of SPLIT_TOKENS: tiles, splits, the order of their
merge and a query's place in its tile follow from its position. A decode fills one query of a slice: the kernel is bound
by its reads of K/V all the same. Chunks pay more, as a slice has fewer queries than a block of the prefill kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from segue_kernels.decode_attention import DecodePlan, decode_attention, decode_tiling, plan_decode
from triton import knobs

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape
from engine.attention.triton_backend import RowTables, cut_rows

TILE_ROWS = 64
"""Query heads of a kv-head times queries of a slice: one warp-group's matrix instruction."""

SPLIT_TOKENS = 1024

ITEMS_MAX = 1024
"""Splits whose partial results exist at one time (256 KiB each at 32 heads of 128, 16 queries); more go in turns."""


@dataclass(slots=True)
class AlignedPlan:
    """`turns`: the step's slices, in groups of at most ITEMS_MAX splits."""

    turns: list[RowTables]
    items: int
    """Splits of the turn that has most."""
    decode: dict[int | None, list[DecodePlan]] = field(default_factory=dict)
    """By window."""


def slice_queries(group: int, head_dim: int, kv_dtype: torch.dtype) -> int:
    """Queries of a slice: a power of two that divides the kernel's tile of keys."""
    fitting = max(1, TILE_ROWS // group)
    tile = decode_tiling(head_dim, kv_dtype, packed=TILE_ROWS).tile
    return min(1 << (fitting.bit_length() - 1), int(tile))


class AlignedTritonAttention:
    name = "triton, batch-invariant"
    capabilities = AttentionCapabilities(
        devices=("cuda", "cpu") if knobs.runtime.interpret else ("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    )

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.queries = slice_queries(shape.heads // shape.kv_heads, shape.head_dim, shape.dtype)

    def plan(self, batch: AttentionBatch) -> AlignedPlan:
        """Needs the lengths on the host: reads them back where the batch does not carry them."""
        lens, starts = batch.seq_lens_on_host(), batch.query_starts_on_host()
        counts = [after - before for before, after in pairwise(starts)]
        slices = aligned_slices(counts, lens, self.queries)
        rows = cut_rows(batch, slices)
        splits = [-(-length // SPLIT_TOKENS) for length in slice_lengths(slices, lens)]
        turns = turns_of(splits)
        return AlignedPlan([part_of(rows, turn) for turn in turns], max(sum(splits[turn]) for turn in turns))

    def forward(
        self,
        plan: AlignedPlan,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        if window not in plan.decode:
            plan.decode[window] = self._plan_turns(plan, window, kv_pages.dtype)
        for decode in plan.decode[window]:
            decode_attention(decode, layer, q, kv_pages, out, scale=scale, soft_cap=soft_cap)
        return out

    def _plan_turns(self, plan: AlignedPlan, window: int | None, kv_dtype: torch.dtype) -> list[DecodePlan]:
        """One after the other they use the same memory for partial results."""
        known = next((plans[0] for plans in plan.decode.values()), None)
        plans: list[DecodePlan] = []
        for rows in plan.turns:
            made = self._plan_decode(rows, plan.items, window, kv_dtype)
            known = known or made
            plans.append(replace(made, partial=known.partial, lse=known.lse))
        return plans

    def _plan_decode(self, rows: RowTables, items: int, window: int | None, kv_dtype: torch.dtype) -> DecodePlan:
        return plan_decode(
            rows.block_tables,
            rows.seq_lens,
            rows.query_starts,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            kv_dtype=kv_dtype,
            queries_max=self.queries,
            window=window,
            tiling=decode_tiling(self.shape.head_dim, kv_dtype, packed=TILE_ROWS),
            split_tokens=SPLIT_TOKENS,
            items_max=items,
        )


def aligned_slices(counts: Sequence[int], lengths: Sequence[int], queries: int) -> list[list[int]]:
    """Cut rows with `counts` queries at the end of `lengths` tokens at multiples of `queries` positions."""
    slices = []
    for count, length in zip(counts, lengths, strict=True):
        begin = length - count
        cuts = [begin, *range((begin // queries + 1) * queries, length, queries), length]
        slices.append([after - before for before, after in pairwise(cuts)])
    return slices


def slice_lengths(slices: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """How many keys each slice has: up to its own last query."""
    return [
        length - sum(parts[at + 1 :]) for parts, length in zip(slices, lengths, strict=True) for at in range(len(parts))
    ]


def turns_of(splits: Sequence[int]) -> list[slice]:
    """Neighbouring slices with at most ITEMS_MAX splits together; one slice may have more."""
    turns, first, taken = [], 0, 0
    for at, count in enumerate(splits):
        if at > first and taken + count > ITEMS_MAX:
            turns.append(slice(first, at))
            first, taken = at, 0
        taken += count
    return [*turns, slice(first, len(splits))]


def part_of(rows: RowTables, turn: slice) -> RowTables:
    return RowTables(rows.block_tables[turn], rows.seq_lens[turn], rows.query_starts[turn.start : turn.stop + 1])
