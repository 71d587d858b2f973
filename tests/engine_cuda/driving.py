"""Engines over one small random model, driven by the planner as a worker would drive them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from segue_kernels.programmatic_launch import supports_pdl

from engine.cuda.assemble import graph_runner
from engine.cuda.layer_ops import FusedOps
from engine.cuda.random_model import llama_spec, random_model
from engine.cuda.runner import GraphRunner
from engine.engine import DTYPES, ModelInfo, build_model
from engine.row_state import RowState
from engine.runner import Runner
from engine.sampling_state import SamplingState
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig
from segue.sampling_params import SamplingParams

ROWS = 8
POSITIONS = 96
BLOCK = 8
PAGES = 64
SPEC = llama_spec(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab_rows=211, max_position=POSITIONS
)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    sampling: SamplingParams


def small_model(device: torch.device, dtype: torch.dtype = torch.float32, *, pages_total: int = PAGES) -> ModelInfo:
    return random_model(
        SPEC,
        dtype=dtype,
        device=device,
        block_size=BLOCK,
        pages_total=pages_total,
        max_model_len=POSITIONS,
        seed=3,
        eos_ids=(7,),
        vocab_size=205,
    )


def parts_of(info: ModelInfo, decode_backend: str, *, fused: bool):
    """(model, pages, rows, eager runner); pages start as NaN, so that a read of an unwritten slot shows."""
    config = EngineConfig(attention_prefill="torch", attention_decode=decode_backend)
    model = build_model(info, config, positions_max=POSITIONS + 8)
    if fused:
        model.ops = FusedOps(pdl=supports_pdl(info.device))
        for layer in model.parameters.layers:  # a CPU's layout of wide weights is transposed
            layer.qkv, layer.gate_up = layer.qkv.contiguous(), layer.gate_up.contiguous()
    shape = (info.pages_total, *info.layout.page_shape)
    pages = torch.full(shape, float("nan"), dtype=DTYPES[info.layout.dtype], device=info.device)
    state = RowState(ROWS, POSITIONS + 8, info.layout.block_size, info.device)
    sampling = SamplingState(ROWS, info.card.vocab_size, info.spec.vocab_rows, info.card.eos_ids, info.device)
    return model, pages, state, Runner(model, pages, state, sampling)


def reference_engine() -> Runner:
    """Plain torch on the CPU."""
    return parts_of(small_model(torch.device("cpu")), "torch", fused=False)[3]


def graph_engine(device: torch.device, *, capture: bool | None = None, chunk_tokens_max: int = 16) -> GraphRunner:
    """Fused kernels; graphs where there is a GPU, unless `capture` says otherwise."""
    return graph_engine_over(device, PAGES, capture=capture, chunk_tokens_max=chunk_tokens_max)[0]


def graph_engine_over(
    device: torch.device, pages_total: int, *, capture: bool | None = None, chunk_tokens_max: int = 16
) -> tuple[GraphRunner, torch.Tensor]:
    """The same over a pool of `pages_total` pages, and the pool."""
    info = small_model(device, pages_total=pages_total)
    model, pages, state, eager = parts_of(info, "triton", fused=True)
    capture = device.type == "cuda" if capture is None else capture
    runner = graph_runner(
        eager, model, state, pages, info.card.vocab_size, chunk_tokens_max=chunk_tokens_max, capture=capture
    )
    return runner, pages


def planner(depth: int, steps_max: int = 1, budget: int = 16, pages: int = PAGES) -> BatchPlanner:
    limits = PlannerLimits(ROWS, budget, POSITIONS, depth, steps_max)
    return BatchPlanner(BlockPool(pages, BLOCK), limits, eos_ids=(7,))


def generate(
    engine: Runner | GraphRunner, requests: Mapping[int, Request], *, depth: int = 0, steps_max: int = 1
) -> dict[int, list[int]]:
    """Run all requests to their end; tokens by request. The planner's invariants are checked after every step."""
    batch = planner(depth, steps_max)
    for seq, request in requests.items():
        batch.add(seq, request.prompt, len(request.prompt), request.sampling, b"root", order=seq)
    tokens: dict[int, list[int]] = {seq: [] for seq in requests}
    flights: deque[int] = deque()
    while batch.has_work() or flights:
        plan = batch.plan()
        if plan is not None:
            engine.launch(plan)
            flights.append(plan.op)
            continue
        flights.popleft()
        for update in batch.finished(engine.collect()):
            assert update.finish != "error", update.error
            tokens[update.seq] += update.tokens
        batch.check()
    return tokens
