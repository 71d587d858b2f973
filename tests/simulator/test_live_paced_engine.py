"""The engine of the live comparison: as long as the cost model says, from when it could begin, and late when it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams
from worker_runtime.toy_engine import ToyEngine

COST = CostModel(
    prefill=PrefillCost(base_us=0.0, token_us=10_000.0, pair_us=0.0),
    decode=DecodeCost(base_us=50_000.0, row_us=0.0, kv_token_us=1_000.0),
    kv_token_bytes=8,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(scope="module")
def paced() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "live_paced_engine.py"
    spec = importlib.util.spec_from_file_location("live_paced_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt_plan() -> BatchPlan:
    start = RowStart(0, 1, [5, 6, 7, 8], 4, 0, [0, 1], SamplingParams(max_tokens=9))
    return BatchPlan(op=1, starts=[start], chunks=[Chunk(0, 0, 4, True)])


def test_a_plan_lasts_as_long_as_the_model_says(paced: ModuleType) -> None:
    clock = Clock()
    engine = paced.PacedEngine(ToyEngine(8, 4), COST, lambda: clock.now_s, clock.sleep)
    engine.launch(prompt_plan())
    assert engine.collect().elapsed_us == 40_000
    engine.launch(BatchPlan(op=2, decodes=[0]))
    assert engine.collect().elapsed_us == 50_000 + 5 * 1_000
    assert (engine.busy_s, engine.late_s) == (pytest.approx(0.095), 0.0)


def test_what_was_launched_ahead_begins_when_the_engine_is_free(paced: ModuleType) -> None:
    clock = Clock()
    engine = paced.PacedEngine(ToyEngine(8, 4), COST, lambda: clock.now_s, clock.sleep)
    engine.launch(prompt_plan())
    engine.launch(BatchPlan(op=2, decodes=[0]))
    engine.collect()
    engine.collect()
    assert clock.now_s == pytest.approx(0.095)


def test_a_machine_that_is_too_slow_shows(paced: ModuleType) -> None:
    clock = Clock()
    engine = paced.PacedEngine(ToyEngine(8, 4), COST, lambda: clock.now_s, clock.sleep)
    engine.launch(prompt_plan())
    clock.now_s += 1.0
    assert engine.collect().elapsed_us == 1_000_000
    assert engine.late_s == pytest.approx(0.96)
