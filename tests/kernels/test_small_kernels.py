"""Norm, activation, embedding and RoPE + KV store against their eager twins, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.activation import silu_mul, silu_mul_reference
from segue_kernels.embedding import embedding, embedding_reference
from segue_kernels.norm import rms_norm, rms_norm_reference
from segue_kernels.rope_store import rope_store, rope_store_reference

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rope_table(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(device=device, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("hidden", [8, 72, 576])
def test_rms_norm_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, hidden: int
) -> None:
    x = randn(5, hidden, dtype=dtype, device=device, seed=1)
    gain = randn(hidden, dtype=dtype, device=device, seed=2)
    torch.testing.assert_close(
        rms_norm(x, gain, 1e-5), rms_norm_reference(x, gain, 1e-5), rtol=tolerance, atol=tolerance
    )


def test_rms_norm_adds_the_residual_in_place(device: torch.device) -> None:
    x = randn(3, 72, dtype=torch.float32, device=device, seed=1)
    residual = randn(3, 72, dtype=torch.float32, device=device, seed=2)
    gain = randn(72, dtype=torch.float32, device=device, seed=3)
    expected_residual = x + residual
    expected = rms_norm_reference(x, gain, 1e-6, residual=residual.clone())
    torch.testing.assert_close(rms_norm(x, gain, 1e-6, residual=residual), expected)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", [1, 70, 1536])
def test_silu_mul_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, width: int
) -> None:
    gate_up = randn(3, 2 * width, dtype=dtype, device=device, seed=3) * 4
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding_picks_rows_and_zeros_padding(device: torch.device, ids_dtype: torch.dtype) -> None:
    table = randn(11, 72, dtype=torch.float32, device=device, seed=4)
    ids = torch.tensor([3, 0, -1, 10], dtype=ids_dtype, device=device)
    out = embedding(ids, table)
    assert torch.equal(out, embedding_reference(ids, table))
    assert not out[2].any()


def paged_case(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block: int
) -> tuple[torch.Tensor, ...]:
    """Five tokens: first and last slot of the pool, one without a slot, the last of a page and the first of another."""
    pages = randn(9, 3, 2, kv_heads, block, dim, dtype=dtype, device=device, seed=5)
    slots = torch.tensor([0, 9 * block - 1, -1, 3 * block - 1, 5 * block], device=device)
    qkv = randn(5, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device, seed=6)
    frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
    rope = rope_table(frequencies, 40)[[0, 7, 0, 39, 20]].to(device)
    return pages, slots, qkv, rope


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(9, 3, 64, 16), (4, 2, 80, 5), (8, 8, 16, 64)])
def test_rope_store_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, dim: int, block: int
) -> None:
    pages, slots, qkv, rope = paged_case(device, dtype, heads, kv_heads, dim, block)
    expected_pages = pages.clone()
    expected = rope_store_reference(qkv, rope, slots, expected_pages, 1, heads)
    q = rope_store(qkv, rope, slots, pages, 1, heads)
    torch.testing.assert_close(q, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pages, expected_pages, rtol=tolerance, atol=tolerance)


def test_rope_store_touches_only_the_slots_of_live_tokens(device: torch.device) -> None:
    pages, slots, qkv, rope = paged_case(device, torch.float32, 4, 2, 16, 5)
    before = pages.clone()
    rope_store(qkv, rope, slots, pages, 2, 4)
    changed = (pages != before).any(-1).nonzero()
    touched = {(page, layer, offset) for page, layer, _, _, offset in changed.tolist()}
    assert touched == {(0, 2, 0), (8, 2, 4), (2, 2, 4), (5, 2, 0)}


@pytest.mark.gpu
def test_rope_store_reaches_pages_past_two_gibi_elements(device: torch.device) -> None:
    heads, kv_heads, dim, block, layers = 4, 2, 128, 64, 32
    page_elements = layers * 2 * kv_heads * block * dim
    count = 2**31 // page_elements + 3
    pages = torch.zeros(count, layers, 2, kv_heads, block, dim, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([(count - 1) * block + 5], device=device)
    qkv = randn(1, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=device, seed=7)
    rope = rope_table(1.0 / 10000 ** (torch.arange(0, dim, 2) / dim), 64)[5:6].to(device)
    rope_store(qkv, rope, slots, pages, layers - 1, heads)
    assert torch.equal(pages[-1, -1, 1, :, 5].reshape(-1), qkv[0, -kv_heads * dim :])
    assert pages[-1].count_nonzero() == pages[-1, -1, :, :, 5].count_nonzero()
    assert not pages[:4].any()
