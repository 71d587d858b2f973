"""Known without a simulator: a cached prefix saves attention too, and static batches wait for their longest."""

from __future__ import annotations

import random

import pytest

from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.workload import Workload, WorkloadRequest

STEP_US = 10_000.0
COST = CostModel(
    prefill=PrefillCost(base_us=0.0, token_us=0.01, pair_us=0.0),
    decode=DecodeCost(base_us=STEP_US, row_us=0.0, kv_token_us=0.0),
    kv_token_bytes=8,
)
BATCH = 16


def test_eighty_percent_hits_of_a_128k_prompt_save_69_percent_of_its_prefill() -> None:
    """Less than 80 %: the uncached tokens still attend to the whole prompt."""
    prefill = Instance(model="llama3.1-8b", node="h200", accelerators=1).cost_model().prefill
    cached = round(0.8 * 131_072)
    assert 1.0 - prefill.us(131_072 - cached, cached) / prefill.us(131_072) == pytest.approx(0.69, abs=0.01)


def makespan_us(requests: list[WorkloadRequest]) -> int:
    spec = ClusterSpec(
        prefill=0,
        decode=0,
        aggregated=1,
        cost=COST,
        link=LinkCost(latency_us=0.0, bytes_per_us=1_000.0),
        kv_tokens=100_000,
        block_size=64,
        max_num_seqs=BATCH,
        tokens_output_max=200,
    )
    cluster = Cluster(spec, Workload(name="burst", requests=requests), "round-robin")
    cluster.run()
    return max(each.times_us[-1] for each in cluster.fronts[0].observed.values())


def test_continuous_batching_takes_the_mean_of_lengths_where_static_takes_the_longest() -> None:
    draw = random.Random(1)
    requests = [WorkloadRequest(0, 64, draw.randint(1, 200)) for _ in range(6 * BATCH)]
    batches = [requests[begin : begin + BATCH] for begin in range(0, len(requests), BATCH)]
    static_us = sum(makespan_us(batch) for batch in batches)
    steps_static = sum(max(request.tokens_output for request in batch) for batch in batches)
    steps_least = sum(request.tokens_output for request in requests) / BATCH
    assert static_us == pytest.approx(steps_static * STEP_US, rel=0.03)
    continuous_us = makespan_us(requests)
    assert steps_least * STEP_US < continuous_us < 1.5 * steps_least * STEP_US < static_us
