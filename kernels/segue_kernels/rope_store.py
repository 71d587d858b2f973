"""Rotary position embedding of Q and K, and the store of K and V into pages, in one pass over the QKV projection.

For a head of `dim` elements at position p, with half = dim / 2 and table angles a_i(p) (Su et al. 2021, the half-split
form of Llama checkpoints):

    y[i]        = x[i] * cos(a_i) - x[i + half] * sin(a_i)
    y[i + half] = x[i + half] * cos(a_i) + x[i] * sin(a_i)

Layout: qkv [tokens, (heads + 2 * kv_heads) * dim]; rope [positions, dim] float32, a row is cos(a) then sin(a);
q [tokens, heads, dim]; kv_pages [pages, layers, 2, kv_heads, block, dim]; positions int32 [tokens], -1 for a padding
token, which writes no K/V and gets zeros as q; token i belongs to row token_rows[i] of block_tables int32
[rows, blocks_max]. Page offsets are 64-bit. One program per (token, group of
heads), a group never mixing Q, K and V.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.programmatic_launch import launch_options


@triton.jit
def rotate_halves(low, high, rope_ptr, position, index, HALF: tl.constexpr):
    """Rotate (low, high) = (x[i], x[i + half]) by the angles of `position` for pair indices `index`; float32."""
    inside = index < HALF
    angles = rope_ptr + position.to(tl.int64) * (2 * HALF) + index
    cos = tl.load(angles, mask=inside, other=1.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def page_slots(
    pages_ptr, table_ptr, position, kv_heads, kv, layer, page_stride, KV_HEADS: tl.constexpr, PAGE_SIZE, DIM
):
    """Addresses of element 0 of `position` for each of `kv_heads`, in K (kv = 0) or V (kv = 1) of `layer`."""
    page = tl.load(table_ptr + position // PAGE_SIZE).to(tl.int64)
    lines = ((layer * 2 + kv) * KV_HEADS + kv_heads) * PAGE_SIZE + position % PAGE_SIZE
    return pages_ptr + page * page_stride + lines.to(tl.int64) * DIM


@triton.jit
def rope_store_kernel(
    qkv_ptr,
    rope_ptr,
    positions_ptr,
    token_rows_ptr,
    tables_ptr,
    q_ptr,
    pages_ptr,
    layer,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    HALF: tl.constexpr = DIM // 2
    heads = first + tl.arange(0, GROUP)
    index = tl.arange(0, BLOCK)
    inside = (heads >= 0)[:, None] & (index < HALF)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + token)
    source = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + heads[:, None] * DIM + index[None, :]
    live = inside & (position >= 0)
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    if first < HEADS + KV_HEADS:
        low, high = rotate_halves(low, high, rope_ptr, tl.maximum(position, 0), index[None, :], HALF)
    if first < HEADS:
        target = q_ptr + (token * HEADS + heads[:, None]) * DIM + index[None, :]
        tl.store(target, low.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)
    elif position >= 0:
        table = tables_ptr + tl.load(token_rows_ptr + token).to(tl.int64) * table_stride
        kv = (first - HEADS) // KV_HEADS
        kv_heads = heads - HEADS - kv * KV_HEADS
        slots = page_slots(pages_ptr, table, position, kv_heads, kv, layer, page_stride, KV_HEADS, PAGE_SIZE, DIM)
        target = slots[:, None] + index[None, :]
        tl.store(target, low.to(pages_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(pages_ptr.dtype.element_ty), mask=inside)


def head_group(heads: int, kv_heads: int) -> int:
    """Heads handled by one program: a power of two that divides both counts, at most 8."""
    return math.gcd(heads, kv_heads, 8)


def rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    heads: int,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns q [tokens, heads, dim] rotated; K (rotated) and V of live tokens are in `kv_pages` afterwards."""
    tokens = qkv.shape[0]
    _, _, _, kv_heads, page_size, dim = kv_pages.shape
    group = head_group(heads, kv_heads)
    out = qkv.new_empty(tokens, heads, dim) if out is None else out
    if tokens == 0:
        return out
    rope_store_kernel[(tokens, (heads + 2 * kv_heads) // group)](
        qkv,
        rope,
        positions,
        token_rows,
        block_tables,
        out,
        kv_pages,
        layer,
        kv_pages.stride(0),
        block_tables.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(dim // 2),
        GROUP=group,
        PDL=pdl,
        num_warps=max(1, group // 4),
        **launch_options(pdl),
    )
    return out


def rope_store_reference(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    heads: int,
) -> torch.Tensor:
    """The eager twin: same result, same effect on `kv_pages`."""
    tokens = qkv.shape[0]
    _, _, _, kv_heads, page_size, dim = kv_pages.shape
    live = positions >= 0
    q, k, v = qkv.view(tokens, -1, dim).float().split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = rope[positions.long().clamp(min=0)][:, None, :].chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    at = positions[live].long()
    pages = block_tables[token_rows[live].long(), at // page_size].long()
    kv_pages[pages, layer, 0, :, at % page_size] = rotated(k)[live].to(kv_pages.dtype)
    kv_pages[pages, layer, 1, :, at % page_size] = v[live].to(kv_pages.dtype)
    return rotated(q).masked_fill(~live[:, None, None], 0.0).to(qkv.dtype)
