"""Executes batch plans. It decides nothing: rows, pages, chunks and steps are the planner's.

`launch` queues a plan's work and returns; `collect` gives the results in launch order. On a CPU the work is done inside
`launch`. On a GPU it is only enqueued there: sampled tokens stay in the row table for the next plan, and a copy goes to
pinned memory behind an event that `collect` waits for, so a planner at depth 1 plans the next step meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from engine import prompt_scores
from engine.batch_invariant.apart import choose_apart
from engine.model import StepInput
from engine.row_state import RowState
from engine.sampling_state import SampledTokens, SamplingState
from engine.step_batch import build_step
from engine.upload import upload
from segue.errors import InternalError
from segue.plan import BatchPlan, PlanResult, RowTokens, TokenLogprobs


class StepModel(Protocol):
    """What a runner needs of a model."""

    def hidden_states(self, step: StepInput, kv_pages: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_rows]; overwritten by the caller."""


ROW_FAILED = "the model produced logits that are not finite"


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What one step sampled."""

    rows: tuple[int, ...]
    seqs: tuple[int, ...]
    sampled: SampledTokens
    """On the host once `_Launched.ready` says so."""
    scored: list[prompt_scores.ScoredChunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launched:
    op: int
    steps: list[SampledStep]
    started_s: float
    finished_s: float
    """CPU: when the work was done; GPU: unused."""
    ready: torch.cuda.Event | None


class Runner:
    """One engine's rows on one device. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: StepModel,
        kv_pages: torch.Tensor,
        state: RowState,
        sampling: SamplingState,
        *,
        sample_apart: bool = False,
    ) -> None:
        """`sample_apart`: choose each row's token by itself, for batch-invariant engines."""
        self.model = model
        self.kv_pages = kv_pages
        self.state = state
        self.sampling = sampling
        self._choose = partial(choose_apart, sampling) if sample_apart else sampling.choose
        self._launched: deque[_Launched] = deque()

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> None:
        """Apply the plan's row changes and start its compute. InternalError for a plan that contradicts the rows."""
        if plan.steps_max < 1 or (plan.chunks and plan.steps_max > 1):
            raise InternalError(f"plan {plan.op} has steps_max {plan.steps_max} and {len(plan.chunks)} chunks")
        started_s = time.perf_counter()
        self.change_rows(plan)
        steps = []
        if plan.chunks or plan.decodes:
            steps = [self._step(plan) for _ in range(plan.steps_max)]
        ready = None
        if self.state.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._launched.append(_Launched(plan.op, steps, started_s, time.perf_counter(), ready))

    def collect(self) -> PlanResult:
        """Results of the oldest plan not yet collected; waits for a GPU to finish it."""
        if not self._launched:
            raise InternalError("collect without a launched plan")
        launched = self._launched.popleft()
        finished_s = launched.finished_s
        if launched.ready is not None:
            launched.ready.synchronize()
            finished_s = time.perf_counter()
        return PlanResult(
            op=launched.op,
            steps=len(launched.steps),
            rows=row_tokens(launched.steps),
            elapsed_us=int((finished_s - launched.started_s) * 1e6),
            scores=[prompt_scores.row_scores(scored) for step in launched.steps for scored in step.scored],
        )

    def change_rows(self, plan: BatchPlan) -> None:
        """Apply what a plan changes before it computes: rows that end, copied pages, new rows, grown block tables."""
        for row in plan.ends:
            self.state.end(row)
        if plan.copies:
            sources, targets = (upload(pages, self.state.device) for pages in zip(*plan.copies, strict=True))
            whole = self.kv_pages.view(torch.uint8)  # bytes: fp8 has no indexed copy
            whole[targets] = whole[sources]
        for start in plan.starts:
            self.state.start(start.row, start.seq, start.tokens, start.pages, start.tokens_ready)
            self.sampling.start(start.row, start.sampling, start.tokens, start.tokens_prompt)
        self.state.grow(plan.grows)

    def _step(self, plan: BatchPlan) -> SampledStep:
        batch = build_step(self.state, plan.chunks, plan.decodes)
        hidden = self.model.hidden_states(batch.model_input, self.kv_pages)
        scored = prompt_scores.score_chunks(plan.chunks, hidden, self.model.logits, self.state, self.sampling)
        scored = [prompt_scores.to_host(chunk) for chunk in scored]
        rows = batch.rows_sampled
        if not rows:
            return SampledStep((), (), _nothing_sampled(self.state.device), scored)
        seqs = tuple(self.state.seq(row) for row in rows)
        chosen = batch.model_input.sampled
        logits = self.model.logits(hidden if chosen is None else hidden[chosen])
        sampled = self._choose(logits, rows, batch.positions_device, batch.positions_sampled)
        self.state.append(batch.rows_device, batch.positions_device, sampled.tokens, list(rows))
        return SampledStep(rows, seqs, to_host(sampled), scored)


def _nothing_sampled(device: torch.device) -> SampledTokens:
    return SampledTokens(
        torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.bool, device=device)
    )


def to_host(sampled: SampledTokens) -> SampledTokens:
    """Start copies into pinned memory (GPU); on a CPU the tensors are there already."""
    if sampled.tokens.device.type == "cpu":
        return sampled

    def host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    copied = replace(sampled, tokens=host(sampled.tokens), failed=host(sampled.failed))
    if sampled.logprobs is None or sampled.top_values is None or sampled.top_ids is None:
        return copied
    return replace(
        copied,
        logprobs=host(sampled.logprobs),
        top_values=host(sampled.top_values),
        top_ids=host(sampled.top_ids),
    )


def row_tokens(steps: list[SampledStep]) -> list[RowTokens]:
    """One entry for each sampled row, its tokens over all steps; a row that failed in any step reports only that."""
    if not steps or not steps[0].rows:
        return []
    tokens = [step.sampled.tokens.tolist() for step in steps]
    failed = torch.stack([step.sampled.failed for step in steps]).any(dim=0).tolist()
    logprobs = [_logprobs_by_row(step.sampled, len(step.rows)) for step in steps]
    entries = []
    for index, (row, seq) in enumerate(zip(steps[0].rows, steps[0].seqs, strict=True)):
        if failed[index]:
            entries.append(RowTokens(row, seq, [], error=ROW_FAILED))
            continue
        reported = [step_logprobs[index] for step_logprobs in logprobs]
        known = [entry for entry in reported if entry is not None]
        entries.append(RowTokens(row, seq, [step[index] for step in tokens], known or None))
    return entries


def _logprobs_by_row(sampled: SampledTokens, rows: int) -> list[TokenLogprobs | None]:
    entries: list[TokenLogprobs | None] = [None] * rows
    if sampled.logprobs is None or sampled.top_values is None or sampled.top_ids is None:
        return entries
    chosen, values, ids = sampled.logprobs.tolist(), sampled.top_values.tolist(), sampled.top_ids.tolist()
    for at, (index, count) in enumerate(zip(sampled.logprob_rows, sampled.logprob_counts, strict=True)):
        entries[index] = TokenLogprobs(chosen[at], list(zip(ids[at][:count], values[at][:count], strict=True)))
    return entries
