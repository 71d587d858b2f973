"""Gathering pages and merging partial attention, against their eager twins."""

from __future__ import annotations

import pytest
import torch
from attention_cases import paged_case, relative_error
from segue_kernels.attention_gather import (
    gather_pages,
    gather_pages_reference,
    merge_attention,
    merge_attention_reference,
)


@pytest.mark.parametrize(("begin", "end", "tokens"), [(0, 90, 90), (16, 77, 128), (33, 90, 64), (64, 64, 70)])
@pytest.mark.parametrize("block", [16, 24])
def test_gather_copies_a_range_and_zeros_the_rest(
    begin: int, end: int, tokens: int, block: int, device: torch.device
) -> None:
    case = paged_case([90], [1], heads=2, kv_heads=2, dim=80, block=block, dtype=torch.float32, device=device)
    table = case.block_tables[0]
    got = gather_pages(case.kv_pages, 1, table, begin, end, tokens)
    assert torch.equal(got, gather_pages_reference(case.kv_pages, 1, table, begin, end, tokens))


def test_merge_equals_attention_over_all_keys(device: torch.device) -> None:
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 21, 50, generator=random).to(device) * 4
    values = torch.randn(3, 50, 80, generator=random).to(device)
    parts = [
        (torch.softmax(scores[..., keys], -1) @ values[:, keys], torch.logsumexp(scores[..., keys], -1))
        for keys in (slice(0, 9), slice(9, 50))
    ]
    reference, _ = merge_attention_reference(*parts[0], *parts[1])
    out, lse = merge_attention(*parts[0], *parts[1])
    assert relative_error(reference, torch.softmax(scores, -1) @ values) < 1e-6
    assert relative_error(out, reference) < 1e-6
    assert relative_error(lse, torch.logsumexp(scores, -1)) < 1e-6


def test_merge_writes_through_a_token_major_view(device: torch.device) -> None:
    random = torch.Generator().manual_seed(2)
    base = torch.randn(21, 3, 64, generator=random).to(device)
    other = torch.randn(3, 21, 64, generator=random).to(device)
    lse, other_lse = torch.randn(2, 3, 21, generator=random).to(device)
    want, _ = merge_attention_reference(base.transpose(0, 1), lse, other, other_lse)
    merge_attention(base.transpose(0, 1), lse.clone(), other, other_lse)
    assert relative_error(base.transpose(0, 1), want) < 1e-6
