"""Work lists of the attention kernels, made on the device from the rows' lengths, once per step for all layers.

Grids are fixed by the number of rows, so that a captured CUDA graph stays right while lengths grow: the kernels below
write the list again at every replay, and programs whose slot is empty (row -1) return at once. Nothing is read back.

Decode: the tokens a row sees are cut into splits of about equal length. `chunk`, the length aimed at, follows from all
rows together: many tokens are cut into about `items_target` splits (several waves of programs, so that the last wave
is short), few tokens into one wave (`items_wave`) but never finer than one tile. A row's number of splits is rounded to
nearest, so that equal rows just over the target are not all cut in two.
Prefill: one item for each block of BLOCK_M queries; a row's last block, the longest under causal masking, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PROGRAMS_PER_WAVE = 3
"""Split programs that one multiprocessor runs at a time."""

ROWS_BLOCKS = (16, 64, 256)
"""Rows that a planning kernel is compiled for, then powers of two: a step of another number of rows should not wait for
the compiler. Sizes of work lists are not specialised either."""

SLOTS_TIMES_ROWS = 8192
"""Size of the slot-against-row comparison of one planning program: bounds its registers."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """items int32 [items_max, 8], grouped by row: (row or -1, first token, end token, splits of the row, length of the
    row, first query, queries, 0), so that a program finds all it needs in one read.
    rows int32 [rows, 2]: (first item, splits); splits is -1 for rows that another kernel serves, 0 for empty rows."""

    items: torch.Tensor
    rows: torch.Tensor


@triton.jit
def _of_owner(owner, values):
    """For each slot [S] the entry of `values` [R] of the row that owns it, by owner [S, R]; 0 where none does."""
    return tl.sum(tl.where(owner, values[None, :], 0), 1)


@triton.jit(do_not_specialize=["rows", "items_max", "items_target", "items_wave", "chunk_one_wave_max", "window"])
def decode_work_kernel(
    seq_lens,
    query_starts,
    items,
    row_items,
    rows,
    items_max,
    items_target,
    items_wave,
    chunk_one_wave_max,
    window,
    HAS_WINDOW: tl.constexpr,
    QUERIES_ABOVE: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
):
    row = tl.arange(0, ROWS_BLOCK)
    inside = row < rows
    length = tl.load(seq_lens + row, mask=inside, other=0)
    query_first = tl.load(query_starts + row, mask=inside, other=0)
    queries = tl.load(query_starts + row + 1, mask=inside, other=0) - query_first
    mine = inside & (queries > QUERIES_ABOVE) & (queries <= QUERIES_MAX)
    first = tl.zeros_like(length)
    if HAS_WINDOW:
        first = tl.maximum(length - queries + 1 - window, 0) // TILE * TILE
    span = tl.where(mine, length - first, 0)
    tokens = tl.sum(span, 0)
    chunk = tl.minimum(chunk_one_wave_max, tl.cdiv(tokens, items_wave))
    chunk = tl.cdiv(tl.maximum(chunk, tl.maximum(tl.cdiv(tokens, items_target), 1)), TILE) * TILE
    splits = tl.where(span > 0, tl.maximum((span + chunk // 2) // chunk, 1), 0)
    per_split = tl.cdiv(tl.cdiv(span, tl.maximum(splits, 1)), TILE) * TILE
    splits = tl.where(span > 0, tl.cdiv(span, tl.maximum(per_split, 1)), 0)
    base = first
    if SPLIT_TOKENS > 0:
        base = first // SPLIT_TOKENS * SPLIT_TOKENS
        per_split = tl.zeros_like(length) + SPLIT_TOKENS
        splits = tl.where(span > 0, tl.cdiv(length - base, SPLIT_TOKENS), 0)
    ends = tl.cumsum(splits, 0)
    starts = ends - splits

    if tl.program_id(0) == 0:
        tl.store(row_items + row * 2, starts, mask=inside)
        tl.store(row_items + row * 2 + 1, tl.where(mine, splits, -1), mask=inside)

    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    owner = (starts[None, :] <= slot[:, None]) & (slot[:, None] < ends[None, :])
    used = slot < tl.sum(splits, 0)
    split = slot - _of_owner(owner, starts)
    begin = _of_owner(owner, base) + split * _of_owner(owner, per_split)
    end = tl.minimum(begin + _of_owner(owner, per_split), _of_owner(owner, length))
    if SPLIT_TOKENS > 0:
        begin = tl.maximum(begin, _of_owner(owner, first))
    kept = slot < items_max
    item = items + slot * 8
    tl.store(item, tl.where(used, _of_owner(owner, row), -1), mask=kept)
    tl.store(item + 1, begin, mask=kept)
    tl.store(item + 2, end, mask=kept)
    tl.store(item + 3, _of_owner(owner, splits), mask=kept)
    tl.store(item + 4, _of_owner(owner, length), mask=kept)
    tl.store(item + 5, _of_owner(owner, query_first), mask=kept)
    tl.store(item + 6, _of_owner(owner, queries), mask=kept)


@triton.jit(do_not_specialize=["rows", "items_max"])
def prefill_work_kernel(
    query_starts,
    items,
    rows,
    items_max,
    BLOCK_M: tl.constexpr,
    QUERIES_ABOVE: tl.constexpr,
    QUERIES_BELOW: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.arange(0, ROWS_BLOCK)
    inside = row < rows
    queries = tl.load(query_starts + row + 1, mask=inside, other=0) - tl.load(query_starts + row, mask=inside, other=0)
    mine = (queries > QUERIES_ABOVE) & (queries < QUERIES_BELOW)
    blocks = tl.where(mine, tl.cdiv(queries, BLOCK_M), 0)
    ends = tl.cumsum(blocks, 0)
    starts = ends - blocks
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    owner = (starts[None, :] <= slot[:, None]) & (slot[:, None] < ends[None, :])
    used = slot < tl.sum(blocks, 0)
    block = _of_owner(owner, ends) - 1 - slot
    kept = slot < items_max
    tl.store(items + slot * 2, tl.where(used, _of_owner(owner, row), -1), mask=kept)
    tl.store(items + slot * 2 + 1, block * BLOCK_M, mask=kept)


def plan_decode_work(
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    kv_heads: int,
    tile: int,
    queries_above: int,
    queries_max: int,
    window: int | None,
    programs_per_sm: int,
    chunk_one_wave_max: int,
    split_tokens: int = 0,
    split_items_max: int = 0,
) -> DecodeWork:
    """Splits of the rows with queries_above < queries <= queries_max. seq_lens int32 [rows], query_starts [rows + 1].

    `programs_per_sm` sets how finely long batches are cut; splits longer than `chunk_one_wave_max` tokens are not made
    merely to stay within one wave.
    Every row yields at most 1/2 + span / chunk splits or one, so rows + items_target slots always suffice.
    With `split_tokens` rows are cut at its multiples instead, whatever else is in the step, into `split_items_max`
    splits at most.
    """
    rows, device = seq_lens.shape[0], seq_lens.device
    processors = processor_count(device)
    items_target = max(1, processors * programs_per_sm // kv_heads)
    items_max = split_items_max if split_tokens else rows + items_target
    work = DecodeWork(
        torch.empty(items_max, 8, dtype=torch.int32, device=device),
        torch.empty(rows, 2, dtype=torch.int32, device=device),
    )
    rows_block, slots = _planning_blocks(rows)
    decode_work_kernel[(triton.cdiv(items_max, slots),)](
        seq_lens,
        query_starts,
        work.items,
        work.rows,
        rows,
        items_max,
        items_target,
        max(1, processors * PROGRAMS_PER_WAVE // kv_heads),
        chunk_one_wave_max,
        window or 0,
        HAS_WINDOW=window is not None,
        QUERIES_ABOVE=queries_above,
        QUERIES_MAX=queries_max,
        TILE=tile,
        ROWS_BLOCK=rows_block,
        SLOTS=slots,
        SPLIT_TOKENS=split_tokens,
    )
    return work


def plan_prefill_work(
    query_starts: torch.Tensor, *, block_m: int, queries_above: int, queries_below: int, items_max: int
) -> torch.Tensor:
    """int32 [items_max, 2] of (row or -1, first query): rows with queries_above < queries < queries_below."""
    rows = query_starts.shape[0] - 1
    items = torch.empty(items_max, 2, dtype=torch.int32, device=query_starts.device)
    rows_block, slots = _planning_blocks(rows)
    prefill_work_kernel[(triton.cdiv(items_max, slots),)](
        query_starts,
        items,
        rows,
        items_max,
        BLOCK_M=block_m,
        QUERIES_ABOVE=queries_above,
        QUERIES_BELOW=queries_below,
        ROWS_BLOCK=rows_block,
        SLOTS=slots,
    )
    return items


def _planning_blocks(rows: int) -> tuple[int, int]:
    rows_block = next((size for size in ROWS_BLOCKS if size >= rows), triton.next_power_of_2(rows))
    return rows_block, min(64, max(1, SLOTS_TIMES_ROWS // rows_block))


def processor_count(device: torch.device) -> int:
    """Multiprocessors of the GPU; the interpreter plans for a small made-up one."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
