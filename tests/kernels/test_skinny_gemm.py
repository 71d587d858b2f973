"""Matrix-vector and small-batch products against their eager twins, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.skinny_gemm import (
    GemvTile,
    gated_reference,
    gemv,
    gemv_gated,
    gemv_rope,
    linear_reference,
    rope_reference,
)
from segue_kernels.skinny_gemm_dot import DotTile, skinny_gated, skinny_linear

FLOAT = (torch.float32, 1e-4)
# The interpreter truncates float32 to bfloat16 and multiplies bfloat16 tiles wrongly: bfloat16 dots run on GPUs alone.
BFLOAT = (torch.bfloat16, 2e-2)
TILE = GemvTile(rows=4, columns=64, warps=2)
DOT = DotTile(rows=16, columns=32, stages=2, warps=2, prefetch=64)
EPS = 1e-5


def rope_table(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype)


def operands(n: int, k: int, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    x = randn(rows, k, dtype=dtype, device=device, seed=1)
    w = randn(n, k, dtype=dtype, device=device, seed=2) * k**-0.5
    gain = randn(k, dtype=dtype, device=device, seed=3)
    return x, w, gain


@pytest.mark.parametrize(("dtype", "tolerance"), [FLOAT, BFLOAT])
@pytest.mark.parametrize(("n", "k"), [(8, 64), (13, 72), (7, 200)])
@pytest.mark.parametrize("normed", [False, True])
def test_gemv_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, n: int, k: int, normed: bool
) -> None:
    x, w, gain = operands(n, k, 1, dtype, device)
    options = {"gain": gain, "eps": EPS} if normed else {}
    torch.testing.assert_close(
        gemv(x, w, tile=TILE, **options), linear_reference(x, w, **options), rtol=tolerance, atol=tolerance
    )


def test_gemv_adds_into_the_residual(device: torch.device) -> None:
    x, w, _ = operands(13, 72, 1, torch.float32, device)
    residual = randn(1, 13, dtype=torch.float32, device=device, seed=4)
    expected = linear_reference(x, w, residual=residual)
    out = gemv(x, w, residual=residual, tile=TILE)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [FLOAT, BFLOAT])
@pytest.mark.parametrize(("width", "k"), [(8, 64), (5, 72)])
def test_gemv_gated_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, width: int, k: int
) -> None:
    x, w, gain = operands(2 * width, k, 1, dtype, device)
    out = gemv_gated(x, w, gain, EPS, tile=GemvTile(rows=2, columns=64, warps=2))
    torch.testing.assert_close(out, gated_reference(x, w, gain, EPS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [FLOAT, BFLOAT])
@pytest.mark.parametrize("slot", [0, 9, 19])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 16), (4, 2, 10)])
def test_gemv_rope_matches_the_eager_twin(
    device: torch.device, dtype: torch.dtype, tolerance: float, slot: int, heads: int, kv_heads: int, dim: int
) -> None:
    x, w, gain = operands((heads + 2 * kv_heads) * dim, 72, 1, dtype, device)
    pages = randn(4, 2, 2, kv_heads, 5, dim, dtype=dtype, device=device, seed=5)
    at = torch.tensor([slot], device=device)
    rope = rope_table(1.0 / 100 ** (torch.arange(0, dim, 2) / dim), 20)[slot : slot + 1].to(device)
    expected_pages = pages.clone()
    expected = rope_reference(x, w, gain, EPS, rope, at, expected_pages, 1, heads)
    q = gemv_rope(x, w, gain, EPS, rope, at, pages, 1, heads, tile=GemvTile(rows=4, columns=64, warps=2))
    torch.testing.assert_close(q, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pages, expected_pages, rtol=tolerance, atol=tolerance)


def test_gemv_rope_without_a_slot_writes_no_page(device: torch.device) -> None:
    x, w, gain = operands(5 * 16, 72, 1, torch.float32, device)
    pages = randn(4, 2, 2, 1, 5, 16, dtype=torch.float32, device=device, seed=5)
    before = pages.clone()
    rope = rope_table(torch.ones(8), 1).to(device)
    gemv_rope(x, w, gain, EPS, rope, torch.tensor([-1], device=device), pages, 1, 3, tile=TILE)
    assert torch.equal(pages, before)


def dot_cases(device: torch.device) -> list[tuple[torch.dtype, float]]:
    return [FLOAT, BFLOAT] if device.type == "cuda" else [FLOAT]


@pytest.mark.parametrize("rows", [2, 3, 8, 17])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (21, 72)])
def test_skinny_linear_matches_the_eager_twin(device: torch.device, rows: int, n: int, k: int) -> None:
    for dtype, tolerance in dot_cases(device):
        x, w, _ = operands(n, k, rows, dtype, device)
        residual = randn(rows, n, dtype=dtype, device=device, seed=4)
        expected = linear_reference(x, w, residual=residual)
        torch.testing.assert_close(
            skinny_linear(x, w, tile=DOT), linear_reference(x, w), rtol=tolerance, atol=tolerance
        )
        skinny_linear(x, w, residual=residual, tile=DOT)
        torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [2, 8])
def test_skinny_gated_matches_the_eager_twin(device: torch.device, rows: int) -> None:
    for dtype, tolerance in dot_cases(device):
        x, w, _ = operands(2 * 21, 72, rows, dtype, device)
        gate, up = linear_reference(x.float(), w).chunk(2, dim=-1)
        expected = (torch.nn.functional.silu(gate) * up).to(dtype)
        torch.testing.assert_close(skinny_gated(x, w, tile=DOT), expected, rtol=tolerance, atol=tolerance)


def test_skinny_linear_keeps_float32_results_of_bfloat16_operands(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("bfloat16 dots need a GPU")
    x, w, _ = operands(21, 72, 4, torch.bfloat16, device)
    out = torch.empty(4, 21, dtype=torch.float32, device=device)
    skinny_linear(x, w, out=out, tile=DOT)
    torch.testing.assert_close(out, x.float() @ w.float().T, rtol=1e-4, atol=1e-4)
