"""Puts the GPU path of an engine together: an eager runner for any plan, graphs for plain decode steps."""

from __future__ import annotations

import torch

from engine.cuda.decode_graphs import DecodeGraphs, batch_buckets
from engine.cuda.runner import GraphRunner
from engine.model import DecoderModel
from engine.parallel import NullCollectives
from engine.row_state import RowState
from engine.runner import Runner


def graph_runner(
    eager: Runner, model: DecoderModel, state: RowState, kv_pages: torch.Tensor, vocab_size: int, *, capture: bool
) -> GraphRunner:
    """Captures a graph for every batch size up to the number of rows (`capture` False: launches kernel by kernel).

    The decode backend must be able to run inside a capture; `can_capture` says whether it is."""
    graphs = DecodeGraphs(model, kv_pages, state, vocab_size, batch_buckets(len(state.seqs)), capture=capture)
    return GraphRunner(eager, state, graphs)


def can_capture(model: DecoderModel) -> bool:
    """Whether the model's decode attention runs in a captured graph, and the step needs no other rank."""
    return model.decode_backend.capabilities.graph_capture and isinstance(model.collectives, NullCollectives)
