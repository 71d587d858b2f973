"""A batch-invariant engine on a GPU: the same tokens and log-probabilities alone, in company and in any chunks."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from engine.cuda.random_model import llama_spec, random_model
from engine.engine import Engine, load_engine
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.plan import TokenLogprobs
from segue.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SPEC = llama_spec(layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, intermediate=2816, vocab_rows=32_000)
ROWS, PAGES, LENGTH = 32, 512, 4096
Answer = tuple[list[int], list[TokenLogprobs]]


def engine_of(device: torch.device, *, batch_invariant: bool) -> Engine:
    info = random_model(
        SPEC, dtype=torch.bfloat16, device=device, block_size=64, pages_total=PAGES, max_model_len=LENGTH
    )
    scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=2048, pipeline_depth=1)
    return load_engine(ModelConfig(path="random"), EngineConfig(batch_invariant=batch_invariant), scheduler, info=info)


def requests() -> dict[int, tuple[list[int], SamplingParams]]:
    """Some share a beginning; lengths on both sides of a split of the keys."""
    dice = random.Random(1)
    shared = [dice.randrange(30_000) for _ in range(700)]
    found = {}
    for seq in range(20):
        own = [dice.randrange(30_000) for _ in range(dice.choice([1, 40, 500, 1500]))]
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.8]), seed=seq, top_p=dice.choice([1.0, 0.9]), logprobs=2, max_tokens=24
        )
        found[seq] = ((shared if seq % 3 else []) + own, params)
    return found


def answers(
    engine: Engine, batch: BatchPlanner, wanted: dict[int, tuple[list[int], SamplingParams]]
) -> dict[int, Answer]:
    found: dict[int, Answer] = {seq: ([], []) for seq in wanted}
    for seq, (prompt, params) in wanted.items():
        batch.add(seq, prompt, len(prompt), params, b"root", order=seq)
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
            found[update.seq][0].extend(update.tokens)
            found[update.seq][1].extend(update.logprobs or [])
    return found


def planner(budget: int, depth: int = 1) -> BatchPlanner:
    return BatchPlanner(BlockPool(PAGES, 64), PlannerLimits(ROWS, budget, LENGTH, depth, 1), eos_ids=())


def in_company_and_alone(device: torch.device, *, batch_invariant: bool) -> tuple[list[dict[int, Answer]], int]:
    """Answers of all requests at once with three step budgets, then one by one; and how many there are."""
    wanted, runs = requests(), []
    for budget in (2048, 300, 64):
        engine = engine_of(device, batch_invariant=batch_invariant)
        runs.append(answers(engine, planner(budget), wanted))
        engine.close()
    alone: dict[int, Answer] = {}
    for seq in list(wanted)[:6]:
        engine = engine_of(device, batch_invariant=batch_invariant)
        alone |= answers(engine, planner(2048, depth=0), {seq: wanted[seq]})
        engine.close()
    return [*runs, alone], len(wanted)


def test_company_chunks_and_cache_change_no_bit(device: torch.device) -> None:
    (*together, alone), count = in_company_and_alone(device, batch_invariant=True)
    assert len(together[0]) == count
    assert together[1] == together[0]
    assert together[2] == together[0]
    assert alone == {seq: together[0][seq] for seq in alone}


def test_without_the_option_they_do(device: torch.device) -> None:
    (*together, _), _ = in_company_and_alone(device, batch_invariant=False)
    assert together[1] != together[0]
