"""Attention in plain torch, for batch-invariant engines: every query is computed in the tile of its position.

Positions are cut into tiles of QUERIES: 0 .. 7, 8 .. 15, and so on. A call computes one whole tile of one row over the
keys 0 .. end of the tile; queries that the step does not have are zeros there, and keys that do not exist yet are zeros
behind the causal mask. So the shape of the call, and the place of a query in it, follow from the query's position:
chunks, decodes and neighbours change nothing. A decode pays for the other queries of its tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape
from engine.attention.torch_backend import attend, visibility

QUERIES = 8
"""Of a tile. More make decodes dearer, fewer make chunks dearer."""

ALIGNED_TOKENS = 16
"""So many tokens of any head size are a multiple of 64 bytes: gathered heads are aligned alike in every call."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries of one row in one tile."""

    tokens: slice
    """Of the batch."""
    places: slice
    """Of the tile."""
    keys: slice
    """Of the gathered keys."""
    mask: torch.Tensor
    """float32 [QUERIES * group, keys], additive"""


@dataclass(frozen=True, slots=True)
class _Row:
    slices: torch.Tensor
    """int64 [2 * kv_heads * blocks]: the row's K and V at layer 0 in the matrix of (page, layer, kind, head) slices"""
    length: int
    """Tokens that exist; gathered ones behind are zeroed."""
    tiles: tuple[_Tile, ...]


@dataclass(slots=True)
class AlignedPlan:
    batch: AttentionBatch
    seq_lens: tuple[int, ...]
    query_starts: tuple[int, ...]
    rows: dict[int | None, list[_Row]] = field(default_factory=dict)
    """By window."""


class AlignedTorchAttention:
    name = "torch, batch-invariant"
    capabilities = AttentionCapabilities(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16, torch.float16))

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.group = shape.heads // shape.kv_heads

    def plan(self, batch: AttentionBatch) -> AlignedPlan:
        return AlignedPlan(batch, batch.seq_lens_on_host(), batch.query_starts_on_host())

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
        if window not in plan.rows:
            count = len(plan.seq_lens)
            plan.rows[window] = [self._row(plan, row, kv_pages.shape[1], window) for row in range(count)]
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        for row in plan.rows[window]:
            keys, values = self._gathered(row, layer, kv_pages).to(q.dtype)
            for tile in row.tiles:
                seen = keys[None, :, tile.keys], values[None, :, tile.keys]
                self._attend(tile, q, *seen, scale, soft_cap, out)
        return out

    def _row(self, plan: AlignedPlan, row: int, layers: int, window: int | None) -> _Row:
        block_size, kv_heads = self.shape.block_size, self.shape.kv_heads
        length, first = plan.seq_lens[row], plan.query_starts[row]
        begin = length - (plan.query_starts[row + 1] - first)
        end = -(-length // QUERIES) * QUERIES
        step = math.lcm(block_size, ALIGNED_TOKENS)
        blocks = -(-length // block_size)
        gathered = -(-max(end, length) // step) * step // block_size
        pages = plan.batch.block_tables[row, :blocks].long()
        pages = torch.cat((pages, pages[-1:].expand(gathered - blocks))) * (layers * 2 * kv_heads)
        heads = torch.arange(2 * kv_heads)[:, None]
        mask = self._mask(end - QUERIES, window)
        starts = range(begin // QUERIES * QUERIES, length, QUERIES)
        tiles = tuple(self._tile(start, begin, length, first, window, mask) for start in starts)
        return _Row((pages[None, :] + heads).flatten(), length, tiles)

    def _mask(self, before: int, window: int | None) -> torch.Tensor:
        """What the last tile sees; the others look at its right end."""
        return visibility(QUERIES, before, window, torch.device("cpu")).repeat_interleave(self.group, dim=0)

    def _tile(self, start: int, begin: int, length: int, first: int, window: int | None, mask: torch.Tensor) -> _Tile:
        """The tile at position `start` of a row with queries at begin .. length-1, which are tokens from `first` on."""
        low, high, end = max(start, begin), min(start + QUERIES, length), start + QUERIES
        key = 0 if window is None else max(0, start - window + 1) // ALIGNED_TOKENS * ALIGNED_TOKENS
        tokens = slice(first + low - begin, first + high - begin)
        return _Tile(tokens, slice(low - start, high - start), slice(key, end), mask[:, mask.shape[1] - (end - key) :])

    def _gathered(self, row: _Row, layer: int, kv_pages: torch.Tensor) -> torch.Tensor:
        """[2, kv_heads, tokens, dim]"""
        _, _, _, kv_heads, block_size, dim = kv_pages.shape
        slices = kv_pages.view(-1, block_size * dim).index_select(0, row.slices + layer * 2 * kv_heads)
        gathered = slices.view(2, kv_heads, -1, dim)
        gathered[:, :, row.length :] = 0.0
        return gathered

    def _attend(
        self,
        tile: _Tile,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        soft_cap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Fills the tile's part of `out`, which is like q."""
        kv_heads, group, dim = self.shape.kv_heads, self.group, q.shape[-1]
        stacked = q.new_zeros(kv_heads, QUERIES, group, dim)
        stacked[:, tile.places] = q[tile.tokens].view(-1, kv_heads, group, dim).transpose(0, 1)
        attended = attend(stacked.view(1, kv_heads, -1, dim), keys, values, tile.mask, scale, soft_cap)
        by_query = attended.view(kv_heads, QUERIES, group, dim)[:, tile.places]
        out[tile.tokens].view(-1, kv_heads, group, dim).copy_(by_query.transpose(0, 1))
