"""Eager twin of the paged attention kernels: plain torch, float32, one row after the other.

    score(i, j) = q_i . k_j * scale * k_scale;   with soft cap c: c * tanh(score / c)
    out_i       = sum_j softmax_j(score(i, j)) * v_j * v_scale      over the keys that query i sees

Query i of a row with `n` queries and length `L` stands at position p = L - n + i and sees keys
max(0, p - window + 1) .. p.
"""

from __future__ import annotations

import torch


def paged_attention_reference(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, heads, dim], kv_pages [pages, layers, 2, kv_heads, block, dim] -> [tokens, heads, dim] like q.

    `kv_scales` float32 [layers, 2, kv_heads] multiplies stored K and V (fp8 pages). Rows of length 0 give zeros, and
    tokens that belong to no row too.
    """
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if length == 0 or queries.start == queries.stop:
            continue
        keys, values = gather_kv(kv_pages, layer, block_tables[row], length, kv_scales)
        out[queries] = _attend(q[queries].float(), keys, values, scale, window, soft_cap).to(q.dtype)
    return out


def gather_kv(
    kv_pages: torch.Tensor, layer: int, block_table: torch.Tensor, length: int, kv_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one row, float32 [kv_heads, length, dim] each."""
    block_size = kv_pages.shape[4]
    pages = block_table[: -(-length // block_size)].long()
    both = kv_pages[pages, layer].float().transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, :length]
    if kv_scales is not None:
        both = both * kv_scales[layer][:, :, None, None]
    return both[0], both[1]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    queries, heads, _ = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    scores = torch.einsum("qhd,hkd->hqk", q, keys.repeat_interleave(group, 0)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - queries, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, 0))
