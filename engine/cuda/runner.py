"""Executes batch plans on a GPU: steps that fit a graph replay it, everything else goes through the eager runner.

All share the row tables, so a row may take either path from one step to the next. Steps of many chunk tokens take the
eager path: there the host keeps ahead of the device. So do chunks whose prompt tokens are to be scored.

A graph samples every row itself: what a row asks for beyond temperature and seed stands in a table on the device
(`row_wishes`), written when the row starts.

For decode steps the host uploads who is in the batch only when that changes: the device advances positions and feeds
tokens back, and the host's mirror of the places advances beside it. Results are copied to pinned memory behind an
event; `collect` waits for it, so at pipeline depth 1 the host plans the next step while this one runs. A pinned buffer
is used again only after its plan was collected.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from segue_kernels.decode_state import Places
from segue_kernels.logprob_report import REPORT_WORDS

from engine.cuda.chunk_graphs import CHUNKS_MAX, ChunkGraphs, StepShape
from engine.cuda.decode_graphs import DecodeGraphs
from engine.cuda.row_wishes import GREEDY, RowWishes, place_words, token_logprobs
from engine.row_state import RowState
from engine.runner import ROW_FAILED, Runner
from engine.step_batch import check_chunk
from segue.errors import InternalError
from segue.plan import BatchPlan, PlanResult, RowTokens


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """Pinned memory of one plan in flight."""

    words: torch.Tensor
    """int32, flat: whatever block a step uploads fits in"""
    array: npt.NDArray[np.int32]
    """The same memory."""
    results: torch.Tensor
    """int32 [steps_max, places_max]"""
    reports: torch.Tensor
    """float32 [steps_max, places_max, REPORT_WORDS]: log-probabilities, where some row asks for them"""


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    op: int
    rows: list[int]
    seqs: list[int]
    places: list[int]
    """Where each row's token stands in the results."""
    alternatives: list[int | None]
    """How many alternatives each row reports beside its token, None: no log-probabilities."""
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


def _row_tokens(launched: GraphLaunch, index: int, sampled: list[int]) -> RowTokens:
    """A row's tokens over all steps; below zero in any of them, the row failed."""
    row, seq, alternatives = launched.rows[index], launched.seqs[index], launched.alternatives[index]
    if min(sampled) < 0:
        return RowTokens(row, seq, [], error=ROW_FAILED)
    if alternatives is None:
        return RowTokens(row, seq, sampled)
    reports = launched.host.reports[: launched.steps, launched.places[index]]
    return RowTokens(row, seq, sampled, [token_logprobs(report, alternatives) for report in reports])


class GraphRunner:
    """Same contract as `Runner`, which it drives for steps that no graph can do. One thread calls it."""

    def __init__(
        self,
        eager: Runner,
        state: RowState,
        wishes: RowWishes,
        graphs: DecodeGraphs,
        chunk_graphs: ChunkGraphs | None = None,
    ) -> None:
        self._eager, self._state, self._wishes = eager, state, wishes
        self._graphs, self._chunk_graphs = graphs, chunk_graphs
        self._place_words = [GREEDY] * len(state.seqs)
        self._alternatives: list[int | None] = [None] * len(state.seqs)
        self._scores_prompt = [False] * len(state.seqs)
        self._mirror = PlaceMirror()
        self._launched: deque[GraphLaunch | None] = deque()
        """None: the next result comes from the eager runner."""
        self._spare: list[HostBuffers] = []

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> None:
        started_s = time.perf_counter()
        for start in plan.starts:
            self._place_words[start.row] = place_words(start.sampling)
            self._alternatives[start.row] = start.sampling.logprobs
            self._wishes.start(start.row, start.sampling, start.tokens_prompt)
            self._scores_prompt[start.row] = start.sampling.prompt_logprobs is not None
            self._mirror.valid = False
        if plan.steps_max < 1 or (plan.chunks and plan.steps_max > 1):
            raise InternalError(f"plan {plan.op} has steps_max {plan.steps_max} and {len(plan.chunks)} chunks")
        graphs, shape = self._chunk_graphs, self._chunk_shape(plan)
        if self._fits_decode_graph(plan):
            self._eager.change_rows(plan)
            self._launched.append(self._decode(plan, started_s))
        elif graphs is not None and shape is not None:
            self._eager.change_rows(plan)
            self._launched.append(self._chunk_step(plan, graphs, shape, started_s))
        else:
            self._eager.launch(plan)
            self._launched.append(None)

    def collect(self) -> PlanResult:
        if not self._launched:
            raise InternalError("collect without a launched plan")
        launched = self._launched.popleft()
        if launched is None:
            return self._eager.collect()
        if launched.ready is not None:
            launched.ready.synchronize()
        elapsed_us = int((time.perf_counter() - launched.started_s) * 1e6)
        results = launched.host.results[: launched.steps].numpy()[:, launched.places].T.tolist()
        self._spare.append(launched.host)
        rows = [_row_tokens(launched, index, sampled) for index, sampled in enumerate(results)]
        return PlanResult(op=launched.op, steps=launched.steps, rows=rows, elapsed_us=elapsed_us)

    def _fits_decode_graph(self, plan: BatchPlan) -> bool:
        return not plan.chunks and 0 < len(plan.decodes) <= self._graphs.buckets[-1]

    def _chunk_shape(self, plan: BatchPlan) -> StepShape | None:
        if not plan.chunks or self._chunk_graphs is None:
            return None
        if any(self._scores_prompt[chunk.row] for chunk in plan.chunks):
            return None
        tokens = sum(chunk.length for chunk in plan.chunks)
        return self._chunk_graphs.shape(tokens, len(plan.chunks), len(plan.decodes))

    def _decode(self, plan: BatchPlan, started_s: float) -> GraphLaunch:
        rows, state, graphs = plan.decodes, self._state, self._graphs
        positions, seqs = self._decode_rows(rows, plan.steps_max)
        host = self._host_buffers(plan.steps_max)
        if not (self._mirror.valid and self._mirror.rows == rows and self._mirror.positions == positions):
            words = host.array[: graphs.words.numel()].reshape(Places.WORDS, -1)
            words[0, len(rows) :] = -1
            self._fill_places(words, 0, rows, positions)
            graphs.words.view(-1).copy_(host.words[: graphs.words.numel()], non_blocking=True)
        bucket, alternatives = graphs.bucket(len(rows)), [self._alternatives[row] for row in rows]
        for step in range(plan.steps_max):
            graphs.step(bucket)
            host.results[step, :bucket].copy_(graphs.results[:bucket], non_blocking=True)
            self._fetch_reports(host, step, bucket, alternatives)
        for row in rows:
            state.tokens_known[row] += plan.steps_max
        self._mirror = PlaceMirror(list(rows), [position + plan.steps_max for position in positions], True)
        places, event = list(range(len(rows))), self._event()
        return GraphLaunch(plan.op, list(rows), seqs, places, alternatives, plan.steps_max, started_s, host, event)

    def _chunk_step(self, plan: BatchPlan, graphs: ChunkGraphs, shape: StepShape, started_s: float) -> GraphLaunch:
        state = self._state
        for chunk in plan.chunks:
            check_chunk(state, chunk)
        positions, decode_seqs = self._decode_rows(plan.decodes, 1)
        host = self._host_buffers(1)
        block = graphs.fill(host.array[: graphs.layout.total], shape, plan.chunks, plan.decodes, positions)
        sampled = [(place, chunk) for place, chunk in enumerate(plan.chunks) if chunk.sample]
        for place, chunk in sampled:
            self._fill_places(block, place, [chunk.row], [chunk.start + chunk.length - 1])
        self._fill_places(block, CHUNKS_MAX, plan.decodes, positions)
        graphs.words.copy_(host.words[: graphs.layout.total], non_blocking=True)
        graphs.step(shape)
        host.results[0, : shape.places].copy_(graphs.results[: shape.places], non_blocking=True)
        rows = [chunk.row for _, chunk in sampled] + plan.decodes
        seqs = [state.seq(chunk.row) for _, chunk in sampled] + decode_seqs
        places = [place for place, _ in sampled] + list(range(CHUNKS_MAX, CHUNKS_MAX + len(plan.decodes)))
        alternatives = [self._alternatives[row] for row in rows]
        self._fetch_reports(host, 0, shape.places, alternatives)
        for row in rows:
            state.tokens_known[row] += 1
        return GraphLaunch(plan.op, rows, seqs, places, alternatives, 1, started_s, host, self._event())

    def _fetch_reports(self, host: HostBuffers, step: int, places: int, alternatives: list[int | None]) -> None:
        if any(count is not None for count in alternatives):
            host.reports[step, :places].copy_(self._wishes.general.reports[:places], non_blocking=True)

    def _decode_rows(self, rows: list[int], steps: int) -> tuple[list[int], list[int]]:
        """Positions of the newest tokens, and sequences, of decoding rows; their pages must hold `steps` more."""
        positions = [self._state.tokens_known[row] - 1 for row in rows]
        for row, position in zip(rows, positions, strict=True):
            self._state.check_pages(row, position + steps)
        return positions, [self._state.seq(row) for row in rows]

    def _fill_places(self, words: npt.NDArray[np.int32], first: int, rows: list[int], positions: list[int]) -> None:
        """Places `first` .. of a block int32 [5, places]: see `Places`."""
        chosen = [self._place_words[row] for row in rows]
        part = words[:, first : first + len(rows)]
        part[0], part[1] = rows, positions
        part[2] = [words_of_row.temperature_bits for words_of_row in chosen]
        part[3] = [words_of_row.seed_low for words_of_row in chosen]
        part[4] = [words_of_row.seed_high for words_of_row in chosen]

    def _event(self) -> torch.cuda.Event | None:
        """Marks the end of what has been enqueued; None on a CPU, where it is done already."""
        if self._state.device.type != "cuda":
            return None
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return ready

    def _host_buffers(self, steps: int) -> HostBuffers:
        if self._spare and self._spare[-1].results.shape[0] >= steps:
            return self._spare.pop()
        pinned = self._state.device.type == "cuda"
        size, places = self._graphs.words.numel(), self._graphs.buckets[-1]
        if self._chunk_graphs is not None:
            size = max(size, self._chunk_graphs.layout.total)
            places = max(places, self._chunk_graphs.layout.places_max)
        words = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        results = torch.empty(steps, places, dtype=torch.int32, pin_memory=pinned)
        reports = torch.empty(steps, places, REPORT_WORDS, pin_memory=pinned)
        return HostBuffers(words, words.numpy(), results, reports)
