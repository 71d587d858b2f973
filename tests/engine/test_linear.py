"""Every form that `linear` takes computes the same product."""

import pytest
import torch

from engine.linear import FEW_TOKENS, MANY_TOKENS, WIDE_OUT, add_linear, linear, linear_float32


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size_out", [70, WIDE_OUT + 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, FEW_TOKENS, FEW_TOKENS + 1, MANY_TOKENS, MANY_TOKENS + 37])
def test_equals_the_product_in_double_precision(tokens, transposed, size_out, with_bias):
    torch.manual_seed(tokens)
    weight = torch.empty(size_out, 51)
    if transposed:
        weight = torch.empty(51, size_out).t()
    weight.normal_()
    x, bias = torch.randn(tokens, 51), torch.randn(size_out) if with_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_product_can_be_added_to_a_residual_in_place():
    torch.manual_seed(1)
    x, weight, residual = torch.randn(7, 51), torch.randn(70, 51), torch.randn(7, 70)
    expected = residual.double() + x.double() @ weight.double().t()
    add_linear(residual, x, weight)
    torch.testing.assert_close(residual.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_can_be_had_in_float32(dtype):
    torch.manual_seed(2)
    x, weight = torch.randn(3, 51).to(dtype), torch.randn(70, 51).to(dtype)
    out = linear_float32(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-2, atol=5e-2)
