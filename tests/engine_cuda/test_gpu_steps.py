"""What only a GPU can show: captured graphs against launched kernels, chunk graphs both ways, long random schedules."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from engine.cuda import chunk_graphs
from engine.step_batch import build_step
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams
from tests.engine_cuda.driving import (
    Request,
    generate,
    graph_engine,
    graph_engine_over,
    parts_of,
    planner,
    reference_engine,
    small_model,
)

pytestmark = pytest.mark.gpu


def mixed_requests(count: int, seed: int) -> dict[int, Request]:
    rng = random.Random(seed)
    requests = {}
    for seq in range(count):
        temperature = rng.choice([0.0, 0.0, 0.8])
        sampling = SamplingParams(temperature=temperature, seed=rng.getrandbits(64), max_tokens=rng.randint(1, 20))
        requests[seq] = Request([rng.randrange(8, 200) for _ in range(rng.randint(1, 70))], sampling)
    return requests


@pytest.mark.parametrize("sliced_tokens_max", [0, 256])
def test_chunk_graphs_give_the_plain_engines_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, sliced_tokens_max: int
) -> None:
    monkeypatch.setattr(chunk_graphs, "SLICED_TOKENS_MAX", sliced_tokens_max)
    requests = mixed_requests(12, seed=3)
    assert generate(graph_engine(device), requests, depth=1) == generate(reference_engine(), requests)


def test_captured_steps_equal_launched_ones(device: torch.device) -> None:
    requests = mixed_requests(10, seed=4)
    launched = generate(graph_engine(device, capture=False), requests, depth=1)
    assert generate(graph_engine(device, capture=True), requests, depth=1) == launched


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_logits_are_those_of_float32_on_the_cpu(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Relative error in norm, over a chunk and a decode; bfloat16 weights are the rounded float32 ones."""
    logits = []
    for where, kind, fused in ((torch.device("cpu"), torch.float32, False), (device, dtype, True)):
        model, pages, state, _ = parts_of(small_model(where, kind), "triton" if fused else "torch", fused=fused)
        state.start(0, 1, list(range(20, 60)), list(range(6)))
        with torch.inference_mode():
            first = model.forward(build_step(state, [Chunk(0, 0, 39, False)], []).model_input, pages)
            last = model.forward(build_step(state, [], [0]).model_input, pages)
        logits.append(torch.cat([first.flatten(), last.flatten()]).double().cpu())
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < tolerance


def test_random_arrivals_and_cancels_keep_the_invariants(device: torch.device) -> None:
    """10,000 plans on a pool that is often too small: preemption, copy-on-write and both kinds of graph take turns, and
    every third sequence has filters or penalties."""
    rng = random.Random(11)
    engine, batch = graph_engine(device), planner(depth=1, pages=40)
    flights: deque[int] = deque()
    seq, alive = 0, set()
    shared = [rng.randrange(8, 200) for _ in range(24)]
    for _ in range(10_000):
        if len(alive) < 12 and rng.random() < 0.3:
            seq += 1
            prompt = (shared if rng.random() < 0.5 else []) + [rng.randrange(8, 200) for _ in range(rng.randint(1, 40))]
            wishes = rng.choice([{}, {}, {"top_p": 0.8, "top_k": 9}, {"frequency_penalty": 0.4, "logprobs": 3}])
            temperature, tokens = rng.choice([0.0, 0.9]), rng.randint(1, 30)
            sampling = SamplingParams(temperature=temperature, seed=seq, max_tokens=tokens, **wishes)
            batch.add(seq, prompt, len(prompt), sampling, b"root", order=seq)
            alive.add(seq)
        if alive and rng.random() < 0.03:
            cancelled = rng.choice(sorted(alive))
            batch.cancel(cancelled)
            alive.discard(cancelled)
        plan = batch.plan()
        if plan is not None:
            engine.launch(plan)
            flights.append(plan.op)
        if flights and (plan is None or len(flights) > 1):
            flights.popleft()
            for update in batch.finished(engine.collect()):
                assert update.finish != "error", update.error
                assert all(0 <= token < 205 for token in update.tokens)
                if update.finish:
                    alive.discard(update.seq)
        batch.check()
    assert seq > 500


def test_a_row_in_the_last_pages_of_a_pool_of_more_than_2_31_elements(device: torch.device) -> None:
    prompt, tokens = list(range(20, 60)), []
    for pages_total in (64, 2**21 + 64):
        engine, pages = graph_engine_over(device, pages_total)
        assert (pages.numel() > 2**31) == (pages_total > 64)
        own = list(range(pages_total - 8, pages_total))
        start = RowStart(0, 1, prompt, len(prompt), 0, own, SamplingParams(temperature=0.0, max_tokens=16))
        plans = [BatchPlan(op=0, starts=[start], chunks=[Chunk(0, 0, 16, False)])]
        plans += [BatchPlan(op=1, chunks=[Chunk(0, 16, 24, True)]), BatchPlan(op=2, decodes=[0], steps_max=16)]
        for plan in plans:
            engine.launch(plan)
        tokens.append([entry.tokens for _ in plans for entry in engine.collect().rows])
        assert bool(pages[:56].isnan().all())
    assert tokens[0] == tokens[1]
    assert len(tokens[0][1]) == 16
