"""The host's description of a step with chunks: every index it leaves for the device is inside the step's shape."""

from __future__ import annotations

import numpy as np
import torch

from engine.cuda.chunk_graphs import CHUNKS_MAX, ChunkGraphs, StepShape, step_shapes
from engine.cuda.row_wishes import RowWishes
from engine.step_batch import build_step
from segue.plan import Chunk
from tests.engine_cuda.driving import parts_of, small_model


def graphs_of(device: torch.device, shapes: list[StepShape]) -> ChunkGraphs:
    info = small_model(device)
    model, pages, state, eager = parts_of(info, "triton", fused=True)
    wishes = RowWishes(eager.sampling, max(shape.places for shape in shapes))
    return ChunkGraphs(model, pages, state, info.card.vocab_size, wishes.general, shapes, capture=False)


def test_nothing_of_a_larger_step_before_is_left_in_a_smaller_one(device: torch.device) -> None:
    small, large = StepShape(16, 2), StepShape(64, 8)
    graphs = graphs_of(device, [small, large])
    words = np.full(graphs.layout.total, 99, dtype=np.int32)
    graphs.fill(words, large, [Chunk(row, 0, 8, True) for row in range(8)], list(range(8)), [5] * 8)
    places = graphs.fill(words, small, [Chunk(3, 4, 9, True)], [6], [7])
    spans = graphs.layout.spans
    assert words[spans["token_rows"]][:18].tolist() == [3] * 9 + [-1] * 7 + [6, -1]
    assert words[spans["token_positions"]][:18].tolist() == list(range(4, 13)) + [0] * 7 + [7, 0]
    assert words[spans["chunk_last"]].tolist() == [8] + [0] * (CHUNKS_MAX - 1)
    assert words[spans["slice_lens"]].tolist()[:2] == [13, 0]
    assert set(words[spans["slice_starts"]].tolist()[1:]) == {9}
    assert (places[0] == -1).all()


def test_a_chunk_is_cut_into_even_slices_that_see_up_to_their_own_end(device: torch.device) -> None:
    shape = StepShape(256, 0)
    graphs = graphs_of(device, [shape])
    words = np.zeros(graphs.layout.total, dtype=np.int32)
    graphs.fill(words, shape, [Chunk(1, 10, 150, True), Chunk(2, 0, 3, False)], [], [])
    spans = graphs.layout.spans
    assert words[spans["slice_rows"]].tolist()[:7] == [1, 1, 1, 1, 1, 2, 0]
    assert words[spans["slice_starts"]].tolist()[:7] == [0, 30, 60, 90, 120, 150, 153]
    assert words[spans["slice_lens"]].tolist()[:7] == [40, 70, 100, 130, 160, 3, 0]


def test_the_smallest_shape_that_holds_a_step_is_taken(device: torch.device) -> None:
    graphs = graphs_of(device, [StepShape(64, 0), StepShape(64, 8), StepShape(128, 0), StepShape(128, 8)])
    assert graphs.shape(60, 1, 0) == StepShape(64, 0)
    assert graphs.shape(60, 1, 3) == StepShape(64, 8)
    assert graphs.shape(65, 2, 0) == StepShape(128, 0)
    assert graphs.shape(129, 1, 0) is None
    assert graphs.shape(20, CHUNKS_MAX + 1, 0) is None


def test_a_large_step_takes_no_graph_that_is_mostly_padding(device: torch.device) -> None:
    graphs = graphs_of(device, [StepShape(512, 0), StepShape(1024, 0), StepShape(1024, 512)])
    assert graphs.shape(300, 1, 0) == StepShape(512, 0)
    assert graphs.shape(700, 1, 0) is None
    assert graphs.shape(900, 1, 0) == StepShape(1024, 0)
    assert graphs.shape(1024, 1, 100) is None
    assert graphs.shape(1000, 1, 500) == StepShape(1024, 512)


def test_shapes_cover_the_budget_and_all_rows() -> None:
    shapes = step_shapes(2048, 100)
    assert StepShape(1024, 100) in shapes
    assert StepShape(64, 0) in shapes
    assert step_shapes(32, 8) == (StepShape(32, 0), StepShape(32, 8))


def test_residuals_added_inside_products_change_nothing_but_rounding(device: torch.device) -> None:
    """What a GPU does by itself, here on any device."""
    logits = []
    for adds in (False, True):
        model, pages, state, _ = parts_of(small_model(device), "torch", fused=False)
        model.adds_in_product = adds
        state.start(0, 1, list(range(20, 60)), list(range(6)))
        with torch.inference_mode():
            logits.append(model.forward(build_step(state, [Chunk(0, 0, 40, True)], []).model_input, pages))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_tokens_with_kv_stay_on_the_host_and_the_rest_are_there(device: torch.device) -> None:
    _, _, state, _ = parts_of(small_model(device), "torch", fused=False)
    state.start(2, 1, list(range(20, 60)), list(range(6)), tokens_ready=37)
    assert state.tokens[2, :41].tolist() == [0] * 37 + [57, 58, 59, 0]
    assert state.tokens_known[2] == 40
