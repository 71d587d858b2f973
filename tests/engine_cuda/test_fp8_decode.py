"""Fused decode steps with fp8 weights: as with the numbers that those weights stand for."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.fp8_rows import quantize_rows_reference

from engine.cuda.assemble import graph_runner
from engine.cuda.decode_graphs import DecodeGraphs
from engine.fp8 import QUANTISED, Fp8Weight
from engine.model import DecoderModel
from segue.plan import BatchPlan, RowStart
from segue.sampling_params import SamplingParams
from tests.engine_cuda.driving import parts_of, small_model


def quantise(model: DecoderModel, *, stored: bool) -> None:
    """Linear layers in fp8, or (not `stored`) in float32 with the same values."""
    for layer in model.parameters.layers:
        for name in QUANTISED:
            values, scales = quantize_rows_reference(getattr(layer, name))
            exact = values.float() * scales
            setattr(layer, name, Fp8Weight(values, scales.t().contiguous()) if stored else exact)


def decoded(device: torch.device, rows: int, *, stored: bool) -> tuple[list[list[int]], torch.Tensor]:
    """The token of one step for each row, and the pages: rows start with two tokens whose K/V are zero."""
    info = small_model(device)
    model, pages, state, eager = parts_of(info, "triton", fused=True)
    pages.zero_()
    quantise(model, stored=stored)
    runner = graph_runner(eager, model, state, pages, info.card.vocab_size, chunk_tokens_max=16, capture=False)
    greedy = SamplingParams(temperature=0.0)
    starts = [RowStart(row, row, [20 + row, 30, 40 + row], 3, 2, [row], greedy) for row in range(rows)]
    runner.launch(BatchPlan(op=1, starts=starts, decodes=list(range(rows))))
    return [row.tokens for row in runner.collect().rows], pages


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_with_fp8_weights_equal_those_with_the_numbers_they_stand_for(device: torch.device, rows: int) -> None:
    tokens, pages = decoded(device, rows, stored=True)
    expected_tokens, expected_pages = decoded(device, rows, stored=False)
    assert tokens == expected_tokens
    assert float(expected_pages.abs().max()) > 0.1
    torch.testing.assert_close(pages, expected_pages, rtol=1e-4, atol=1e-4)


def test_a_quantised_model_takes_the_fused_step(device: torch.device) -> None:
    info = small_model(device)
    model, pages, state, eager = parts_of(info, "triton", fused=True)
    quantise(model, stored=True)
    runner = graph_runner(eager, model, state, pages, info.card.vocab_size, chunk_tokens_max=16, capture=False)
    graphs = runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    assert graphs._fused is not None
