"""Matrix-vector and small-batch products against their eager twins, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.fp8_rows import quantize_rows_reference
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

from engine.cuda.tiles import FP8_TILES

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


def fp8_operands(n: int, k: int, rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x and gain in float32, w in fp8 and its scales float32 [1, n], rows of very different sizes."""
    x, w, gain = operands(n, k, rows, torch.float32, device)
    values, scales = quantize_rows_reference(w * torch.logspace(-3, 3, n, device=device)[:, None])
    return x, values, scales.t().contiguous(), gain


def near_in_each_column(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Columns have sizes of their own."""
    return bool(((out - expected).abs().amax(0) <= 1e-4 * expected.abs().amax(0) + 1e-12).all())


@pytest.mark.parametrize("normed", [False, True])
def test_gemv_with_fp8_weights_matches_the_eager_twin(device: torch.device, normed: bool) -> None:
    x, w, scales, gain = fp8_operands(13, 200, 1, device)
    options = {"gain": gain, "eps": EPS} if normed else {}
    out = gemv(x, w, scales=scales, tile=TILE, **options)
    assert near_in_each_column(out, linear_reference(x, w, scales=scales, **options))


def test_gemv_gated_with_fp8_weights_matches_the_eager_twin(device: torch.device) -> None:
    x, w, scales, gain = fp8_operands(2 * 5, 72, 1, device)
    out = gemv_gated(x, w, gain, EPS, scales=scales, tile=GemvTile(rows=2, columns=64, warps=2))
    assert near_in_each_column(out, gated_reference(x, w, gain, EPS, scales=scales))


def test_gemv_rope_with_fp8_weights_matches_the_eager_twin(device: torch.device) -> None:
    heads, kv_heads, dim = 3, 1, 16
    x, w, scales, gain = fp8_operands((heads + 2 * kv_heads) * dim, 72, 1, device)
    pages = torch.zeros(4, 2, 2, kv_heads, 5, dim, device=device)
    expected_pages, at = pages.clone(), torch.tensor([7], device=device)
    rope = rope_table(torch.ones(dim // 2), 8)[7:].to(device)
    expected = rope_reference(x, w, gain, EPS, rope, at, expected_pages, 1, heads, scales=scales)
    q = gemv_rope(x, w, gain, EPS, rope, at, pages, 1, heads, scales=scales, tile=TILE)
    torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(pages, expected_pages, rtol=1e-4, atol=1e-4 * float(expected_pages.abs().max()))


@pytest.mark.parametrize("rows", [2, 17])
def test_small_batches_with_fp8_weights_match_the_eager_twin(device: torch.device, rows: int) -> None:
    x, w, scales, _ = fp8_operands(2 * 21, 72, rows, device)
    expected = linear_reference(x, w, scales=scales)
    assert near_in_each_column(skinny_linear(x, w, scales=scales, tile=DOT), expected)
    residual = expected.clone()
    skinny_linear(x, w, scales=scales, residual=residual, tile=DOT)
    assert near_in_each_column(residual, 2 * expected)
    gate, up = expected.chunk(2, dim=-1)
    assert near_in_each_column(skinny_gated(x, w, scales=scales, tile=DOT), torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336)])
def test_fp8_products_of_a_model_in_bfloat16(device: torch.device, rows: int, n: int, k: int) -> None:
    """With the tiles that the engine launches, on sums of a model's length."""
    x, w = (torch.randn(size, k, device=device).bfloat16() for size in (rows, n))
    values, scales = quantize_rows_reference(w)
    scales = scales.t().contiguous()
    if rows == 1:
        out = gemv(x, values, scales=scales, tile=FP8_TILES.single_down)
    else:
        out = skinny_linear(x, values, scales=scales, tile=FP8_TILES.small_down)
    expected = linear_reference(x, values, scales=scales).float()
    assert float((out.float() - expected).norm() / expected.norm()) < 5e-3
