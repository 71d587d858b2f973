"""The gather that opens a decode step: from row tables into batch order, and what a step's batch is made of.

A place b of the batch belongs to row rows[b] of the tables (-1: padding), whose newest token stands at positions[b] and
has no K/V yet. `begin_step` writes

    token_ids[b] = tokens[row, position]             0 for padding
    x[b] = embedding[token_ids[b]]                   zeros for padding
    positions[b], rope[b] = position, rope[position] of position 0 for padding
    slots[b] = where K/V of that position goes       -1 for padding
    seq_lens[b] = position + 1                       0 for padding
    tables[b, :n] = tables[row, :n]                  n = the blocks that hold seq_lens[b] tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Places:
    """Who is in the batch, and how its next token is chosen; one entry per place."""

    rows: torch.Tensor
    """int32 [batch]; -1: padding"""
    positions: torch.Tensor
    """int32 [batch], moved on by sampling"""
    temperatures: torch.Tensor
    """float32 [batch]; 0 is greedy"""
    seeds: torch.Tensor
    """int32 [2, batch]: low words, then high words"""

    WORDS = 5

    @classmethod
    def of(cls, words: torch.Tensor) -> Places:
        """Views of int32 [5, batch], so that one copy changes everything."""
        return cls(words[0], words[1], words[2].view(torch.float32), words[3:5])


@dataclass(frozen=True, slots=True)
class BatchBuffers:
    """A step's inputs in batch order: what `begin_step` writes."""

    token_ids: torch.Tensor
    """int64 [batch]"""
    x: torch.Tensor
    """[batch, hidden] like the embedding"""
    positions: torch.Tensor
    """int64 [batch]"""
    rope: torch.Tensor
    """float32 [batch, dim]"""
    slots: torch.Tensor
    """int64 [batch]: page * page size + offset"""
    seq_lens: torch.Tensor
    """int32 [batch]"""
    tables: torch.Tensor
    """int32 [batch, blocks]"""

    def first(self, batch: int) -> BatchBuffers:
        """Views of the first `batch` places."""
        return BatchBuffers(*(getattr(self, name)[:batch] for name in self.__dataclass_fields__))

    @classmethod
    def allocate(
        cls, batch: int, blocks: int, hidden: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> BatchBuffers:
        return cls(
            token_ids=torch.zeros(batch, dtype=torch.int64, device=device),
            x=torch.zeros(batch, hidden, dtype=dtype, device=device),
            positions=torch.zeros(batch, dtype=torch.int64, device=device),
            rope=torch.zeros(batch, dim, dtype=torch.float32, device=device),
            slots=torch.full((batch,), -1, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(batch, dtype=torch.int32, device=device),
            tables=torch.zeros(batch, blocks, dtype=torch.int32, device=device),
        )


@triton.jit
def begin_step_kernel(
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    tables_ptr,
    embedding_ptr,
    rope_ptr,
    token_ids_ptr,
    x_ptr,
    batch_positions_ptr,
    batch_rope_ptr,
    slots_ptr,
    seq_lens_ptr,
    batch_tables_ptr,
    tokens_stride,
    tables_stride,
    batch_tables_stride,
    HIDDEN: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    live = row >= 0
    known = tl.maximum(row, 0)
    position = tl.where(live, tl.load(positions_ptr + place), -1)
    token = tl.load(tokens_ptr + known * tokens_stride + tl.maximum(position, 0), mask=live, other=0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for start in range(0, HIDDEN, BLOCK):
        columns = start + lane
        values = tl.load(embedding_ptr + token * HIDDEN + columns, mask=(columns < HIDDEN) & live, other=0.0)
        tl.store(x_ptr + place * HIDDEN + columns, values, mask=columns < HIDDEN)
    at = tl.maximum(position, 0).to(tl.int64)
    for start in range(0, DIM, BLOCK):
        columns = start + lane
        angles = tl.load(rope_ptr + at * DIM + columns, mask=columns < DIM)
        tl.store(batch_rope_ptr + place * DIM + columns, angles, mask=columns < DIM)
    table_ptr = tables_ptr + known * tables_stride
    page = tl.load(table_ptr + at // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(token_ids_ptr + place, token)
    tl.store(batch_positions_ptr + place, at)
    tl.store(slots_ptr + place, tl.where(live, page * PAGE_SIZE + at % PAGE_SIZE, -1))
    tl.store(seq_lens_ptr + place, position + 1)
    blocks = (position + PAGE_SIZE) // PAGE_SIZE
    for start in range(0, blocks, BLOCK):
        inside = start + lane < blocks
        pages = tl.load(table_ptr + start + lane, mask=inside)
        tl.store(batch_tables_ptr + place * batch_tables_stride + start + lane, pages, mask=inside)


def begin_step(
    places: Places,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    embedding: torch.Tensor,
    rope: torch.Tensor,
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """Fill `batch` for `places`; see the module. The first kernel of a step: it runs without PDL.

    tokens int64 [rows, positions_max]; tables int32 [rows, blocks]; rope float32 [positions_max, dim].
    """
    hidden = embedding.shape[1]
    begin_step_kernel[(places.rows.shape[0],)](
        places.rows,
        tokens,
        places.positions,
        tables,
        embedding,
        rope,
        batch.token_ids,
        batch.x,
        batch.positions,
        batch.rope,
        batch.slots,
        batch.seq_lens,
        batch.tables,
        tokens.stride(0),
        tables.stride(0),
        batch.tables.stride(0),
        HIDDEN=hidden,
        DIM=rope.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4,
    )


def begin_step_reference(
    places: Places,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    embedding: torch.Tensor,
    rope: torch.Tensor,
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """The eager twin."""
    for place, row in enumerate(places.rows.tolist()):
        position = int(places.positions[place]) if row >= 0 else -1
        at = max(position, 0)
        token = int(tokens[row, at]) if row >= 0 else 0
        batch.token_ids[place] = token
        batch.x[place] = embedding[token] if row >= 0 else 0.0
        batch.positions[place] = at
        batch.rope[place] = rope[at]
        batch.slots[place] = int(tables[row, at // page_size]) * page_size + at % page_size if row >= 0 else -1
        batch.seq_lens[place] = position + 1
        blocks = -(-(position + 1) // page_size)
        batch.tables[place, :blocks] = tables[row, :blocks]
