"""Row state on the device: scattered changes from the host, and the gather that opens a decode step.

`scatter_words` applies (offset, value) pairs of 32-bit words to one flat int32 buffer; a host that keeps everything it
changes in such a buffer needs one small copy and one kernel per plan.

`begin_step` brings row state into batch order. For place b with row r = rows[b] (-1: padding) it writes

    x[b] = embedding[tokens[r]]     (zeros for padding)
    batch_positions[b] = positions[r]                -1 for padding
    seq_lens[b] = positions[r] + 1                    0 for padding
    batch_tables[b, :n] = tables[r, :n]               n = the blocks that hold seq_lens[b] tokens
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
    """A step's inputs in batch order: x [batch, hidden]; positions, seq_lens int32 [batch]; tables int32 [batch, n]."""

    x: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor


@triton.jit
def begin_step_kernel(
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    tables_ptr,
    embedding_ptr,
    x_ptr,
    batch_positions_ptr,
    seq_lens_ptr,
    batch_tables_ptr,
    tables_stride,
    batch_tables_stride,
    HIDDEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    known = tl.maximum(row, 0)
    position = tl.where(row >= 0, tl.load(positions_ptr + known), -1)
    token = tl.load(tokens_ptr + known).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for start in range(0, HIDDEN, BLOCK):
        columns = start + lane
        values = tl.load(embedding_ptr + token * HIDDEN + columns, mask=(columns < HIDDEN) & (position >= 0), other=0.0)
        tl.store(x_ptr + place * HIDDEN + columns, values, mask=columns < HIDDEN)
    tl.store(batch_positions_ptr + place, position)
    tl.store(seq_lens_ptr + place, position + 1)
    blocks = (position + PAGE_SIZE) // PAGE_SIZE
    for start in range(0, blocks, BLOCK):
        inside = start + lane < blocks
        pages = tl.load(tables_ptr + known * tables_stride + start + lane, mask=inside)
        tl.store(batch_tables_ptr + place * batch_tables_stride + start + lane, pages, mask=inside)


def begin_step(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    embedding: torch.Tensor,
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """Fill `batch` for `rows` int32 [batch]; see the module. The first kernel of a step: it runs without PDL."""
    hidden = embedding.shape[1]
    begin_step_kernel[(rows.shape[0],)](
        rows,
        tokens,
        positions,
        tables,
        embedding,
        batch.x,
        batch.positions,
        batch.seq_lens,
        batch.tables,
        tables.stride(0),
        batch.tables.stride(0),
        HIDDEN=hidden,
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
    batch: BatchBuffers,
    page_size: int,
) -> None:
    """The eager twin."""
    for place, row in enumerate(rows.tolist()):
        position = int(positions[row]) if row >= 0 else -1
        blocks = -(-(position + 1) // page_size)
        batch.x[place] = embedding[int(tokens[row])] if position >= 0 else 0.0
        batch.positions[place] = position
        batch.seq_lens[place] = position + 1
        batch.tables[place, :blocks] = tables[row, :blocks]
