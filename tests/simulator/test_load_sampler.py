"""What waits at P and how long a step takes at D, over the time of a run."""

from __future__ import annotations

import pytest

from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from simulator.cluster import Cluster, ClusterSpec
from simulator.load_sampler import LoadSample, LoadSampler
from simulator.workload import Workload, WorkloadRequest

COST = CostModel(
    prefill=PrefillCost(base_us=500.0, token_us=1_000.0, pair_us=0.0),
    decode=DecodeCost(base_us=20_000.0, row_us=400.0, kv_token_us=0.0),
    kv_token_bytes=1_000,
)


def sampled(requests: list[WorkloadRequest]) -> LoadSampler:
    spec = ClusterSpec(
        prefill=1,
        decode=1,
        cost=COST,
        link=LinkCost(latency_us=50.0, bytes_per_us=10_000.0),
        kv_tokens=100_000,
        block_size=64,
        max_num_batched_tokens=1_000,
    )
    cluster = Cluster(spec, Workload(name="sampled", requests=requests), "least-loaded")
    sampler = LoadSampler(cluster)
    cluster.run()
    return sampler


def test_queue_and_step_are_seen_while_they_last() -> None:
    """Three prompts of 4 s each arrive at once; the first answer decodes while the others wait."""
    sampler = sampled([WorkloadRequest(100_000, 4_000, 100) for _ in range(3)])
    by_second = {round(each.at_s): each for each in sampler.samples}
    assert 10.0 < by_second[1].waiting_s <= 12.0
    assert by_second[1].step_ms == 0.0
    assert by_second[5].waiting_s < by_second[1].waiting_s
    assert by_second[5].step_ms == pytest.approx(20.4)


def test_loads_that_move_against_each_other_are_anticorrelated() -> None:
    sampler = sampled([WorkloadRequest(0, 100, 1)])
    sampler.samples = [LoadSample(float(n), n % 2, 5.0 - n % 2) for n in range(20)]
    assert sampler.swing(lambda _: True).correlation == pytest.approx(-1.0)
    assert sampler.swing(lambda at_s: at_s > 100).correlation == 0.0
