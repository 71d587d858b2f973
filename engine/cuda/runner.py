"""Executes batch plans on a GPU: pure decode steps replay a graph, everything else goes through the eager runner.

Both share the row tables, so a row may take either path from one step to the next. A step takes the graph when all its
rows are plain: greedy or temperature alone. Rows with filters, penalties, bias, log-probabilities or a minimum length
take the eager path, with the whole batch.

The host uploads who is in the batch only when that changes: the device advances positions and feeds tokens back, and
the host's mirror of the places advances beside it. Results are copied to pinned memory behind an event; `collect` waits
for it, so at pipeline depth 1 the host plans the next step while this one runs. A pinned buffer is used again only
after its plan was collected.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from segue_kernels.decode_state import Places

from engine.cuda.decode_graphs import DecodeGraphs
from engine.row_state import RowState
from engine.runner import ROW_FAILED, Runner
from engine.sampling_state import has_filter, has_penalty
from segue.errors import InternalError
from segue.plan import BatchPlan, PlanResult, RowTokens
from segue.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PlainSampling:
    """What the graph's sampler needs of a row: its words in the place block."""

    temperature_bits: int
    seed_low: int
    seed_high: int


def plain_sampling(params: SamplingParams) -> PlainSampling | None:
    """None when the row needs more than temperature and seed."""
    filtered = has_filter(params) and not params.is_greedy
    if filtered or has_penalty(params) or params.logit_bias or params.min_tokens > 0 or params.logprobs is not None:
        return None
    seed = np.array([params.seed & 0xFFFFFFFFFFFFFFFF], dtype="<u8").view("<i4")
    bits = np.array([params.temperature], dtype=np.float32).view(np.int32)
    return PlainSampling(int(bits[0]), int(seed[0]), int(seed[1]))


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """Pinned memory of one plan in flight."""

    words: torch.Tensor
    """int32 [5, batch_max]"""
    words_array: npt.NDArray[np.int32]
    results: torch.Tensor
    """int32 [steps_max, batch_max]"""


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    op: int
    rows: list[int]
    seqs: list[int]
    steps: int
    started_s: float
    host: HostBuffers
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class PlaceMirror:
    """What the device's places hold: rows in order and the positions of their newest tokens."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    valid: bool = False


class GraphRunner:
    """Same contract as `Runner`, which it drives for steps that no graph can do. One thread calls it."""

    def __init__(self, eager: Runner, state: RowState, graphs: DecodeGraphs) -> None:
        self._eager, self._state, self._graphs = eager, state, graphs
        self._sampling: list[PlainSampling | None] = [None] * len(state.seqs)
        self._mirror = PlaceMirror()
        self._launched: deque[GraphLaunch | None] = deque()
        """None: the next result comes from the eager runner."""
        self._spare: list[HostBuffers] = []

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> None:
        for start in plan.starts:
            self._sampling[start.row] = plain_sampling(start.sampling)
            self._mirror.valid = False
        if not self._fits_graph(plan):
            self._eager.launch(plan)
            self._launched.append(None)
            return
        started_s = time.perf_counter()
        self._eager.change_rows(plan)
        self._launched.append(self._decode(plan, started_s))

    def collect(self) -> PlanResult:
        if not self._launched:
            raise InternalError("collect without a launched plan")
        launched = self._launched.popleft()
        if launched is None:
            return self._eager.collect()
        if launched.ready is not None:
            launched.ready.synchronize()
        elapsed_us = int((time.perf_counter() - launched.started_s) * 1e6)
        tokens = launched.host.results[: launched.steps, : len(launched.rows)].T.tolist()
        self._spare.append(launched.host)
        rows = [
            RowTokens(row, seq, sampled) if min(sampled) >= 0 else RowTokens(row, seq, [], error=ROW_FAILED)
            for row, seq, sampled in zip(launched.rows, launched.seqs, tokens, strict=True)
        ]
        return PlanResult(op=launched.op, steps=launched.steps, rows=rows, elapsed_us=elapsed_us)

    def _fits_graph(self, plan: BatchPlan) -> bool:
        if plan.chunks or not plan.decodes or len(plan.decodes) > self._graphs.buckets[-1]:
            return False
        return all(self._sampling[row] is not None for row in plan.decodes)

    def _decode(self, plan: BatchPlan, started_s: float) -> GraphLaunch:
        if plan.steps_max < 1:
            raise InternalError(f"plan {plan.op} has steps_max {plan.steps_max}")
        rows, state, graphs = plan.decodes, self._state, self._graphs
        positions = [state.tokens_known[row] - 1 for row in rows]
        seqs = [state.seq(row) for row in rows]
        for row, position in zip(rows, positions, strict=True):
            state.check_pages(row, position + plan.steps_max)
        host = self._host_buffers(plan.steps_max)
        if not (self._mirror.valid and self._mirror.rows == rows and self._mirror.positions == positions):
            self._upload(host, rows, positions)
        bucket = graphs.bucket(len(rows))
        for step in range(plan.steps_max):
            graphs.step(bucket)
            host.results[step, :bucket].copy_(graphs.results[:bucket], non_blocking=True)
        ready = None
        if state.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        for row in rows:
            state.tokens_known[row] += plan.steps_max
        self._mirror = PlaceMirror(list(rows), [position + plan.steps_max for position in positions], True)
        return GraphLaunch(plan.op, list(rows), seqs, plan.steps_max, started_s, host, ready)

    def _upload(self, host: HostBuffers, rows: list[int], positions: list[int]) -> None:
        words, count = host.words_array, len(rows)
        chosen = [plain for plain in (self._sampling[row] for row in rows) if plain is not None]
        words[0, count:] = -1
        words[0, :count] = rows
        words[1, :count] = positions
        words[2, :count] = [plain.temperature_bits for plain in chosen]
        words[3, :count] = [plain.seed_low for plain in chosen]
        words[4, :count] = [plain.seed_high for plain in chosen]
        self._graphs.words.copy_(host.words, non_blocking=True)

    def _host_buffers(self, steps: int) -> HostBuffers:
        if self._spare and self._spare[-1].results.shape[0] >= steps:
            return self._spare.pop()
        batch_max, pinned = self._graphs.buckets[-1], self._state.device.type == "cuda"
        words = torch.full((Places.WORDS, batch_max), -1, dtype=torch.int32, pin_memory=pinned)
        results = torch.empty(steps, batch_max, dtype=torch.int32, pin_memory=pinned)
        return HostBuffers(words, words.numpy(), results)
