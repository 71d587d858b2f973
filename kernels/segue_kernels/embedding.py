"""Embedding lookup: y[i] = table[ids[i]].

Layout: ids int32 or int64 [tokens], table [vocab, hidden] row-major, y [tokens, hidden]. An id below 0 gives a row of
zeros, so that padding rows need no valid token. Offsets are 64-bit: vocab * hidden may exceed 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def embedding_kernel(ids_ptr, table_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    index = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(table_ptr + index * HIDDEN + columns, mask=inside & (index >= 0), other=0.0)
    tl.store(out_ptr + token * HIDDEN + columns, values, mask=inside)


def embedding(ids: torch.Tensor, table: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens] -> [tokens, hidden] of the table's dtype."""
    tokens, hidden = ids.shape[0], table.shape[1]
    out = table.new_empty(tokens, hidden) if out is None else out
    if tokens == 0:
        return out
    block = min(1024, triton.next_power_of_2(hidden))
    embedding_kernel[(tokens, triton.cdiv(hidden, block))](
        ids, table, out, HIDDEN=hidden, BLOCK=block, num_warps=4 if block >= 512 else 1
    )
    return out


def embedding_reference(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The eager twin."""
    rows = table[ids.long().clamp(min=0)]
    return rows.masked_fill((ids < 0)[:, None], 0.0)
