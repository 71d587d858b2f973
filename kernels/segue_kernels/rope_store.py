"""Rotary position embedding of Q and K, and the store of K and V into pages, in one pass over the QKV projection.

For a head of `dim` elements, half = dim / 2, and the angles a_i of the token's position (Su et al. 2021, the half-split
form of Llama checkpoints):

    y[i]        = x[i] * cos(a_i) - x[i + half] * sin(a_i)
    y[i + half] = x[i + half] * cos(a_i) + x[i] * sin(a_i)

Layout: qkv [tokens, (heads + 2 * kv_heads) * dim]; rope float32 [tokens, dim], a row is cos(a) then sin(a);
q [tokens, heads, dim]; kv_pages [pages, layers, 2, kv_heads, block, dim]; slots int64 [tokens] = page * block + offset,
-1 for a padding token, which writes no K/V. Page offsets are 64-bit. One program per (token, group of heads), a group
never mixing Q, K and V.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from segue_kernels.programmatic_launch import launch_options


@triton.jit
def rotate_halves(low, high, angles_ptr, index, HALF: tl.constexpr):
    """Rotate (low, high) = (x[i], x[i + half]) for pairs `index` by the angles at `angles_ptr`; float32."""
    cos = tl.load(angles_ptr + index, mask=index < HALF, other=1.0)
    sin = tl.load(angles_ptr + HALF + index, mask=index < HALF, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def kv_lines(pages_ptr, slot, kv_heads, kv, layer, page_stride, KV_HEADS: tl.constexpr, PAGE_SIZE, DIM):
    """Addresses of element 0 of `slot` (int64) for each of `kv_heads`, in K (kv = 0) or V (kv = 1) of `layer`."""
    lines = ((layer * 2 + kv) * KV_HEADS + kv_heads) * PAGE_SIZE
    return pages_ptr + slot // PAGE_SIZE * page_stride + (lines + slot % PAGE_SIZE) * DIM


@triton.jit(do_not_specialize=["layer"])
def rope_store_kernel(
    qkv_ptr,
    rope_ptr,
    slots_ptr,
    q_ptr,
    pages_ptr,
    layer,
    page_stride,
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
    source = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + heads[:, None] * DIM + index[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if first < HEADS + KV_HEADS:
        low, high = rotate_halves(low, high, rope_ptr + token * DIM, index[None, :], HALF)
    if first < HEADS:
        target = q_ptr + (token * HEADS + heads[:, None]) * DIM + index[None, :]
        tl.store(target, low.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            kv = (first - HEADS) // KV_HEADS
            kv_heads = heads - HEADS - kv * KV_HEADS
            lines = kv_lines(pages_ptr, slot, kv_heads, kv, layer, page_stride, KV_HEADS, PAGE_SIZE, DIM)
            target = lines[:, None] + index[None, :]
            tl.store(target, low.to(pages_ptr.dtype.element_ty), mask=inside)
            tl.store(target + HALF, high.to(pages_ptr.dtype.element_ty), mask=inside)


def head_group(heads: int, kv_heads: int) -> int:
    """Heads handled by one program: a power of two that divides both counts, at most 8."""
    return math.gcd(heads, kv_heads, 8)


def rope_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    heads: int,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns q [tokens, heads, dim] rotated; K (rotated) and V of tokens with a slot are in `kv_pages` afterwards."""
    tokens = qkv.shape[0]
    _, _, _, kv_heads, page_size, dim = kv_pages.shape
    group = head_group(heads, kv_heads)
    out = qkv.new_empty(tokens, heads, dim) if out is None else out
    if tokens == 0:
        return out
    rope_store_kernel[(tokens, (heads + 2 * kv_heads) // group)](
        qkv,
        rope,
        slots,
        out,
        kv_pages,
        layer,
        kv_pages.stride(0),
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
    qkv: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor, kv_pages: torch.Tensor, layer: int, heads: int
) -> torch.Tensor:
    """The eager twin: same result, same effect on `kv_pages`."""
    _, _, _, kv_heads, page_size, dim = kv_pages.shape
    q, k, v = qkv.view(qkv.shape[0], -1, dim).float().split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = rope[:, None, :].chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    live = slots >= 0
    pages, offsets = slots[live] // page_size, slots[live] % page_size
    kv_pages[pages, layer, 0, :, offsets] = rotated(k)[live].to(kv_pages.dtype)
    kv_pages[pages, layer, 1, :, offsets] = v[live].to(kv_pages.dtype)
    return rotated(q).to(qkv.dtype)
