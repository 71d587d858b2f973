"""Ragged paged batches for the attention tests: random pages in random order, stale bytes where nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedCase:
    q: torch.Tensor
    kv_pages: torch.Tensor
    kv_scales: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor


def paged_case(
    lengths: list[int],
    queries: list[int],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: int = 2,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PagedCase:
    """Rows of `lengths` tokens, the last `queries` of each being queries. Unwritten tokens hold NaN."""
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block) for length in lengths]
    pages = sum(blocks) + 3
    kv = torch.randn(pages, layers, 2, kv_heads, block, dim, generator=random)
    order = torch.randperm(pages, generator=random)
    tables = torch.full((len(lengths), max([*blocks, 1])), 2**30, dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[used : used + count]
        if length % block:
            kv[order[used + count - 1], :, :, :, length % block :] = float("nan")
        used += count
    kv[order[used:]] = float("nan")
    scales = None
    if kv_dtype is not None:
        scales = (torch.rand(layers, 2, kv_heads, generator=random) + 0.5).to(device)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), heads, dim, generator=random)
    return PagedCase(
        q=q.to(device, dtype),
        kv_pages=kv.to(device).to(kv_dtype or dtype),
        kv_scales=scales,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=starts.to(device),
    )


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`; NaN anywhere gives NaN, which passes no bound."""
    return float((out.float() - want.float()).norm() / want.float().norm())


def attention_signature(
    kv_type: str, *, q_type: str | None = None, extra: dict[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Types of the attention kernels' run-time parameters, and those that are multiples of 16 in practice."""
    q_type = q_type or ("fp32" if kv_type == "fp32" else "bf16")
    strides = ["q_token", "q_head", "out_token", "out_head", "page", "kind", "head"]
    signature = {
        "q": f"*{q_type}",
        "kv": f"*{kv_type}",
        "kv_scales": "*fp32",
        "out": f"*{q_type}",
        **(extra or {}),
        "items": "*i32",
        "block_tables": "*i32",
        "scale": "fp32",
        "soft_cap": "fp32",
        "window": "i32",
        **{f"stride_{name}": "i32" for name in strides},
        "stride_table": "i32",
    }
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    return signature, [*aligned, *(f"stride_{name}" for name in strides)]
