"""Puts the GPU path of an engine together: an eager runner for any plan, graphs for plain decode steps."""

from __future__ import annotations

import torch

from engine.cuda.chunk_graphs import ChunkGraphs, step_shapes
from engine.cuda.decode_graphs import DecodeGraphs, batch_buckets
from engine.cuda.row_wishes import RowWishes
from engine.cuda.runner import GraphRunner
from engine.model import DecoderModel
from engine.parallel import NullCollectives
from engine.row_state import RowState
from engine.runner import Runner


def graph_runner(
    eager: Runner,
    model: DecoderModel,
    state: RowState,
    kv_pages: torch.Tensor,
    vocab_size: int,
    *,
    chunk_tokens_max: int,
    capture: bool,
) -> GraphRunner:
    """Captures a graph for every batch size up to the number of rows, and for steps with prefill chunks of up to
    `chunk_tokens_max` tokens (`capture` False: launches kernel by kernel). `can_capture` says whether a model can."""
    rows = len(state.seqs)
    shapes = step_shapes(chunk_tokens_max, rows)
    wishes = RowWishes(eager.sampling, max(shape.places for shape in shapes))
    general = wishes.general
    graphs = DecodeGraphs(model, kv_pages, state, vocab_size, general, batch_buckets(rows), capture=capture)
    chunk_graphs = ChunkGraphs(model, kv_pages, state, vocab_size, general, shapes, capture=capture)
    return GraphRunner(eager, state, wishes, graphs, chunk_graphs)


def can_capture(model: DecoderModel) -> bool:
    """Whether the model's decode attention runs in a captured graph, and the step needs no other rank."""
    return model.decode_backend.capabilities.graph_capture and isinstance(model.collectives, NullCollectives)
