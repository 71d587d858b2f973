"""Contiguous K/V of one row out of its pages, and the merge of attention over disjoint sets of keys.

Both serve attention libraries that want contiguous keys. Gathering moves 2 * bytes of K/V; merging reads two results
and writes one. Merging (log-sum-exp, natural logarithm):

    lse = log(e^lse_a + e^lse_b);   out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["begin", "end"])
def gather_pages_kernel(
    target,
    kv,
    block_table,
    begin,
    end,
    tokens,
    stride_page,
    stride_kind,
    stride_head,
    KV_HEADS: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    kind = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    token = begin + place
    stored = token < end
    pages = tl.load(block_table + token // PAGE, mask=stored, other=0).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    source = pages * stride_page + kind.to(tl.int64) * stride_kind + head * stride_head
    inside = (dim < HEAD_DIM)[None, :]
    tile = tl.load(
        kv + source[:, None] + ((token % PAGE) * STRIDE_TOKEN)[:, None] + dim[None, :],
        mask=stored[:, None] & inside,
        other=0.0,
    )
    row = tl.program_id(1).to(tl.int64) * tokens + place
    tl.store(target + row[:, None] * HEAD_DIM + dim[None, :], tile, mask=(place < tokens)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens"])
def merge_attention_kernel(
    out,
    lse,
    other,
    other_lse,
    tokens,
    stride_out_head,
    stride_out_token,
    stride_lse_head,
    stride_other_head,
    stride_other_token,
    stride_other_lse_head,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = token < tokens
    a = tl.load(lse + head * stride_lse_head + token, mask=inside, other=0.0)
    b = tl.load(other_lse + head * stride_other_lse_head + token, mask=inside, other=0.0)
    peak = tl.maximum(a, b)
    weight_a = tl.exp(a - peak)
    weight_b = tl.exp(b - peak)
    total = weight_a + weight_b
    dim = tl.arange(0, DIM_BLOCK)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    out_place = out + head * stride_out_head + token.to(tl.int64)[:, None] * stride_out_token + dim[None, :]
    other_place = other + head * stride_other_head + token.to(tl.int64)[:, None] * stride_other_token + dim[None, :]
    mine = tl.load(out_place, mask=mask, other=0.0).to(tl.float32)
    theirs = tl.load(other_place, mask=mask, other=0.0).to(tl.float32)
    merged = mine * (weight_a / total)[:, None] + theirs * (weight_b / total)[:, None]
    tl.store(out_place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * stride_lse_head + token, peak + tl.log(total), mask=inside)


def gather_pages(
    kv_pages: torch.Tensor, layer: int, block_table: torch.Tensor, begin: int, end: int, tokens: int
) -> torch.Tensor:
    """[2, kv_heads, tokens, dim]: positions begin .. end-1 of one row, then zeros up to `tokens`.

    kv_pages [pages, layers, 2, kv_heads, block, dim]; block_table int32 [blocks], contiguous.
    """
    _, _, _, kv_heads, block_size, dim = kv_pages.shape
    target = torch.empty(2, kv_heads, tokens, dim, dtype=kv_pages.dtype, device=kv_pages.device)
    tile = 64
    gather_pages_kernel[(triton.cdiv(tokens, tile), 2 * kv_heads)](
        target,
        kv_pages[:, layer],
        block_table,
        begin,
        end,
        tokens,
        kv_pages.stride(0),
        kv_pages.stride(2),
        kv_pages.stride(3),
        KV_HEADS=kv_heads,
        STRIDE_TOKEN=kv_pages.stride(4),
        HEAD_DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=block_size,
        TILE=tile,
    )
    return target


def gather_pages_reference(
    kv_pages: torch.Tensor, layer: int, block_table: torch.Tensor, begin: int, end: int, tokens: int
) -> torch.Tensor:
    """Eager twin of `gather_pages`."""
    both = kv_pages[block_table.long(), layer].transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, begin:end]
    return torch.nn.functional.pad(both, (0, 0, 0, tokens - (end - begin)))


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `other` into `out` in place. out, other [heads, tokens, dim]; lse, other_lse float32 [heads, tokens]."""
    heads, tokens, dim = out.shape
    assert lse.stride(1) == 1 and other_lse.stride(1) == 1 and out.stride(2) == 1 and other.stride(2) == 1
    tile = 16
    merge_attention_kernel[(triton.cdiv(tokens, tile), heads)](
        out,
        lse,
        other,
        other_lse,
        tokens,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        other.stride(0),
        other.stride(1),
        other_lse.stride(0),
        HEAD_DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        TILE=tile,
    )
    return out, lse


def merge_attention_reference(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager twin of `merge_attention`; returns new tensors."""
    total = torch.logaddexp(lse, other_lse)
    merged = out.float() * (lse - total).exp()[..., None] + other.float() * (other_lse - total).exp()[..., None]
    return merged.to(out.dtype), total
