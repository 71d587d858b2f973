"""Attention in plain torch: the CPU path, and the reference for kernels on any device.

A page's slice of one layer, K or V, and one kv-head is `block_size * head_dim` contiguous elements. Seen as a matrix
whose rows are such slices, a sequence's K and V of a layer are one `index_select` into `[kv_head][token][dim]` order,
after which attention is dense. Row indices are made once per step; a layer only adds an offset.

Decode pads rows to one length; a page may hold leftovers of its previous owner behind a row's end (NaN, even), so
padded V is zeroed and padded scores are masked rather than trusted.

Prefill takes its queries in tiles, each with the keys that it sees: the fused routine computes whole blocks of keys, so
that one call for a chunk computes what lies above the diagonal too. The query heads of a kv-head are stacked into one
matrix. A layer of SmolLM2, 512 tokens after 0 / 512 / 3584 on one AVX2 core: 24.4 / 54.1 / 209 ms in one call for the
chunk, 16.2 / 42.6 / 198 in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape

LENGTH_SLACK = 256
"""Tokens of padding that cost less than another pass for a group of its own."""

QUERY_TILE = 64
"""32 and 128 are up to 10 % slower after few and after many keys, on one thread."""

QUERY_TILE_SHARED = 128
"""Where threads share a tile by its pieces of 64 stacked rows: 9 pieces of SmolLM2's tile of 64 queries keep two of
them busy for 90 % of the time, 18 for all of it."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Neighbouring queries of one chunk and what they see."""

    queries: slice
    """Tokens of the batch."""
    keys: slice
    """Tokens of the gathered K/V."""
    mask: torch.Tensor
    """float32 [queries * group, keys], additive."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """Where one group of rows reads its K/V, for one window size."""

    slices: torch.Tensor
    """int64 [2 * rows * kv_heads * blocks]: row of the slice matrix at layer 0, K then V."""
    length: int
    """Tokens gathered per row (blocks * block_size, or exact for a single row)."""
    mask: torch.Tensor | None = None
    """Decode: float32 [rows, 1, 1, length], additive; None: everything is visible."""
    tail: tuple[torch.Tensor, torch.Tensor] | None = None
    """Decode: (row, token) of gathered tokens that are no row's own."""
    rows: torch.Tensor | None = None
    """Decode: int64 rows of this group; None: all."""
    tiles: tuple[_Tile, ...] = ()
    """Prefill: all queries of the row, in order."""


@dataclass(slots=True)
class TorchPlan:
    batch: AttentionBatch
    seq_lens: tuple[int, ...]
    query_starts: tuple[int, ...]
    gathers: dict[int | None, list[_Gather]] = field(default_factory=dict)


class TorchBackend:
    name = "torch"
    capabilities = AttentionCapabilities(devices=("cpu", "cuda"), dtypes=(torch.float32, torch.bfloat16, torch.float16))

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.group = shape.heads // shape.kv_heads

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        return TorchPlan(batch, batch.seq_lens_on_host(), batch.query_starts_on_host())

    def forward(
        self,
        plan: TorchPlan,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if window not in plan.gathers:
            plan.gathers[window] = self._gathers(plan, kv_pages.shape[1], window)
        gathers = plan.gathers[window]
        if plan.batch.decode_only and gathers[0].rows is None:
            attended = self._decode(gathers[0], layer, q, kv_pages, scale, soft_cap)
            return attended if out is None else out.copy_(attended)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if plan.batch.decode_only:
            for gather in gathers:
                out[gather.rows] = self._decode(gather, layer, q[gather.rows], kv_pages, scale, soft_cap)
            return out
        for gather in gathers:
            self._prefill(gather, layer, q, kv_pages, scale, soft_cap, out)
        return out

    def _gathers(self, plan: TorchPlan, layers: int, window: int | None) -> list[_Gather]:
        if plan.batch.decode_only:
            groups = rows_by_length(plan.seq_lens)
            if len(groups) == 1:
                return [self._decode_gather(plan, None, layers, window)]
            return [self._decode_gather(plan, group, layers, window) for group in groups]
        return [self._prefill_gather(plan, row, layers, window) for row in range(len(plan.seq_lens))]

    def _slices(self, blocks: torch.Tensor, layers: int) -> torch.Tensor:
        """Slice-matrix rows of layer 0 for page ids `blocks` [rows, n], ordered [K|V][row][kv_head][block]."""
        kv_heads = self.shape.kv_heads
        heads = torch.arange(kv_heads, device=blocks.device)[None, :, None]
        pages = blocks.long()[:, None, :] * (layers * 2 * kv_heads)
        keys = pages + heads
        return torch.cat((keys.flatten(), (keys + kv_heads).flatten()))

    def _decode_gather(self, plan: TorchPlan, group: list[int] | None, layers: int, window: int | None) -> _Gather:
        block_size, device = self.shape.block_size, self.shape.device
        lens = torch.tensor(plan.seq_lens, dtype=torch.int64)
        rows = None if group is None else torch.tensor(group)
        if rows is not None:
            lens = lens[rows]
            rows = rows.to(device)
        tables = plan.batch.block_tables if rows is None else plan.batch.block_tables[rows]
        first = torch.zeros_like(lens) if window is None else (lens - window).clamp(min=0)
        first_block = first // block_size
        blocks_needed = -(-lens // block_size) - first_block
        columns = torch.arange(int(blocks_needed.max()))[None, :]
        wanted = torch.where(columns < blocks_needed[:, None], first_block[:, None] + columns, first_block[:, None])
        blocks = tables.gather(1, wanted.to(device))
        positions = first_block[:, None] * block_size + torch.arange(columns.shape[1] * block_size)[None, :]
        foreign = positions >= lens[:, None]
        hidden = foreign | (positions < first[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :]
        tail = foreign.nonzero(as_tuple=True)
        return _Gather(
            slices=self._slices(blocks, layers),
            length=positions.shape[1],
            mask=mask.to(device) if hidden.any() else None,
            tail=(tail[0].to(device), tail[1].to(device)) if len(tail[0]) else None,
            rows=rows,
        )

    def _prefill_gather(self, plan: TorchPlan, row: int, layers: int, window: int | None) -> _Gather:
        block_size, device = self.shape.block_size, self.shape.device
        length, queries = plan.seq_lens[row], plan.query_starts[row + 1] - plan.query_starts[row]
        start = length - queries
        first_block = 0 if window is None else max(0, start - window + 1) // block_size
        blocks = plan.batch.block_tables[row : row + 1, first_block : -(-length // block_size)]
        first = first_block * block_size
        return _Gather(
            slices=self._slices(blocks, layers),
            length=length - first,
            tiles=self._tiles(plan.query_starts[row], queries, start - first, window, device),
        )

    def _tiles(
        self, first_token: int, queries: int, before: int, window: int | None, device: torch.device
    ) -> tuple[_Tile, ...]:
        """`before`: gathered keys in front of the chunk. All tiles look at one mask, each at its own columns."""
        tile = QUERY_TILE if torch.get_num_threads() == 1 else QUERY_TILE_SHARED
        starts = range(0, queries, tile)
        columns_before = before + starts[-1]
        visible = visibility(min(tile, queries), columns_before, window, device)
        mask = visible.repeat_interleave(self.group, dim=0)
        tiles = []
        for start in starts:
            count = min(tile, queries - start)
            position = before + start
            first_key = 0 if window is None else max(0, position - window + 1)
            shift = columns_before - position
            tiles.append(
                _Tile(
                    slice(first_token + start, first_token + start + count),
                    slice(first_key, position + count),
                    mask[: count * self.group, first_key + shift : position + count + shift],
                )
            )
        return tuple(tiles)

    def _gathered(self, gather: _Gather, layer: int, kv_pages: torch.Tensor) -> torch.Tensor:
        """[2, rows, kv_heads, tokens, dim] of one layer; tokens are whole blocks."""
        _, _, _, kv_heads, block_size, dim = kv_pages.shape
        slices = kv_pages.view(-1, block_size * dim).index_select(0, gather.slices + layer * 2 * kv_heads)
        blocks = -(-gather.length // block_size)
        return slices.view(2, -1, kv_heads, blocks * block_size, dim)

    def _decode(
        self,
        gather: _Gather,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        scale: float,
        soft_cap: float | None,
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        kv = self._gathered(gather, layer, kv_pages).to(q.dtype)
        if gather.tail is not None:
            kv.permute(1, 3, 0, 2, 4).index_put_(gather.tail, kv.new_zeros(()))
        grouped = q.reshape(rows, self.shape.kv_heads, self.group, dim)
        return attend(grouped, kv[0], kv[1], gather.mask, scale, soft_cap).reshape(rows, heads, dim)

    def _prefill(
        self,
        gather: _Gather,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        scale: float,
        soft_cap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Fills the row's part of `out`, which is like q."""
        kv_heads, group, dim = self.shape.kv_heads, self.group, q.shape[-1]
        kv = self._gathered(gather, layer, kv_pages)[:, :, :, : gather.length].to(q.dtype)
        for tile in gather.tiles:
            stacked = q[tile.queries].view(-1, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
            keys, values = kv[:, :, :, tile.keys]
            attended = attend(stacked, keys, values, tile.mask, scale, soft_cap)
            by_query = attended.view(kv_heads, -1, group, dim).transpose(0, 1)
            out[tile.queries].view(-1, kv_heads, group, dim).copy_(by_query)


def rows_by_length(seq_lens: Sequence[int]) -> list[list[int]]:
    """Groups of rows for which padding to the group's longest at most doubles the K/V that is read."""
    order = sorted(range(len(seq_lens)), key=lambda row: -seq_lens[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and seq_lens[row] * 2 + LENGTH_SLACK >= seq_lens[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def visibility(queries: int, before: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Additive mask float32 [queries, before + queries]: the first query stands behind `before` keys."""
    key = torch.arange(before + queries, device=device)[None, :]
    query = torch.arange(before, before + queries, device=device)[:, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Dense attention [batch, heads, queries, dim]; `mask` is additive and broadcasts to [batch, heads, queries, keys].

    With a soft cap the scores are capped before the mask, which the fused routine cannot do."""
    if soft_cap is None:
        typed = None if mask is None else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=typed, scale=scale)
    scores = (q.float() @ keys.float().transpose(-1, -2)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask
    return (torch.softmax(scores, dim=-1) @ values.float()).to(q.dtype)
