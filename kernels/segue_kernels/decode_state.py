"""Row state on the device: scattered changes from the host, and the gather that opens a decode step.

`scatter_words` applies (offset, value) pairs of 32-bit words to one flat int32 buffer; a host that keeps everything it
changes in such a buffer needs one small copy and one kernel per plan.

`begin_step` brings row state into batch order. For place b with row r = rows[b] (-1: padding) it writes

    token_ids[b] = tokens[r]                         0 for padding
    x[b] = embedding[tokens[r]]                      zeros for padding
    batch_positions[b] = positions[r]                0 for padding
    batch_rope[b] = rope[batch_positions[b]]
    slots[b] = where K/V of that position goes       -1 for padding
    seq_lens[b] = positions[r] + 1                   0 for padding
    batch_tables[b, :n] = tables[r, :n]              n = the blocks that hold seq_lens[b] tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def scatter_words_kernel(target_ptr, updates_ptr, count, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    offset = tl.load(updates_ptr + 2 * item, mask=inside, other=0)
    value = tl.load(updates_ptr + 2 * item + 1, mask=inside, other=0)
    tl.store(target_ptr + offset, value, mask=inside)


def scatter_words(target: torch.Tensor, updates: torch.Tensor) -> None:
    """target int32 [words], updates int32 [n, 2] of (offset, value); an offset occurs at most once."""
    count = updates.shape[0]
    if count:
        scatter_words_kernel[(triton.cdiv(count, 256),)](target, updates, count, BLOCK=256, num_warps=2)


def scatter_words_reference(target: torch.Tensor, updates: torch.Tensor) -> None:
    """The eager twin."""
    target[updates[:, 0].long()] = updates[:, 1]


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
    position = tl.load(positions_ptr + known, mask=live, other=-1)
    token = tl.load(tokens_ptr + known, mask=live, other=0).to(tl.int64)
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
    rows: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    embedding: torch.Tensor,
    rope: torch.Tensor,
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """Fill `batch` for `rows` int32 [batch]; see the module. The first kernel of a step: it runs without PDL.

    tokens, positions int32 [rows_max]; tables int32 [rows_max, blocks]; rope float32 [positions, dim].
    """
    hidden = embedding.shape[1]
    begin_step_kernel[(rows.shape[0],)](
        rows,
        tokens,
        positions,
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
        tables.stride(0),
        batch.tables.stride(0),
        HIDDEN=hidden,
        DIM=rope.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4,
    )


def begin_step_reference(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    embedding: torch.Tensor,
    rope: torch.Tensor,
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """The eager twin."""
    for place, row in enumerate(rows.tolist()):
        position = int(positions[row]) if row >= 0 else -1
        at = max(position, 0)
        batch.token_ids[place] = tokens[row] if row >= 0 else 0
        batch.x[place] = embedding[int(tokens[row])] if row >= 0 else 0.0
        batch.positions[place] = at
        batch.rope[place] = rope[at]
        batch.slots[place] = int(tables[row, at // page_size]) * page_size + at % page_size if row >= 0 else -1
        batch.seq_lens[place] = position + 1
        blocks = -(-(position + 1) // page_size)
        batch.tables[place, :blocks] = tables[row, :blocks]
