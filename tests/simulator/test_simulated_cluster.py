"""A whole simulated cluster: what clients see, the same bytes for the same seed, and numbers that add up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from simulator.cluster import Cluster, ClusterSpec
from simulator.generators import Lengths, independent, shared_prefix_groups
from simulator.report import RunSummary, Slo, summarise
from simulator.trace_front import End
from simulator.traces import read_trace
from simulator.workload import Workload, WorkloadRequest

DATA = Path(__file__).parent.parent / "data"
COST = CostModel(
    prefill=PrefillCost(base_us=500.0, token_us=20.0, pair_us=0.0),
    decode=DecodeCost(base_us=5_000.0, row_us=20.0, kv_token_us=0.0),
    kv_token_bytes=1_000,
)
SPEC = ClusterSpec(
    prefill=2, decode=2, cost=COST, link=LinkCost(latency_us=50.0, bytes_per_us=10_000.0), kv_tokens=400_000
)


def run(workload: Workload, policy: str = "segue", **changes: object) -> Cluster:
    cluster = Cluster(msgspec.structs.replace(SPEC, **changes), workload, policy)
    cluster.run()
    return cluster


def figures(workload: Workload, policy: str = "segue", **changes: object) -> RunSummary:
    return summarise(run(workload, policy, **changes), policy, Slo())


def one(tokens_prompt: int, tokens_output: int) -> Workload:
    return Workload(name="one", requests=[WorkloadRequest(0, tokens_prompt, tokens_output)])


def test_one_request_takes_what_the_cost_model_says() -> None:
    summary = figures(one(5_000, 101), block_size=64)
    assert summary.completed == 1
    assert summary.ttft_mean_s == pytest.approx(0.1005, abs=0.003)
    assert summary.tpot_mean_ms == pytest.approx(5.02, abs=0.2)
    assert (summary.tokens_prefilled, summary.tokens_wasted) == (5_000, 0)


def test_every_page_of_the_prompt_is_moved_once() -> None:
    assert figures(one(5_000, 10), block_size=64).bytes_moved == 79 * 64 * 1_000


def test_every_request_gets_exactly_the_tokens_of_its_trace() -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    cluster = run(workload)
    seen = cluster.fronts[0].observed
    assert all(each.end is End.COMPLETED for each in seen.values())
    assert [len(seen[index].times_us) for index in range(60)] == [each.tokens_output for each in workload.requests]
    for each in seen.values():
        assert list(each.times_us) == sorted(each.times_us)


def test_clients_may_ask_for_just_what_they_get() -> None:
    """The planner itself ends an answer by its length then: the engine's end of sequence would come as late."""
    workload = read_trace(DATA / "conversation_60.jsonl")
    seen = run(workload, tokens_output_max=0).fronts[0].observed
    assert [len(seen[index].times_us) for index in range(60)] == [each.tokens_output for each in workload.requests]


def test_instances_without_a_way_to_fetch_are_asked_for_nothing() -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    assert sum(worker.tokens_brought["peer"] for worker in run(workload, fetches=False).workers) == 0


def test_nothing_is_left_behind() -> None:
    cluster = run(read_trace(DATA / "conversation_60.jsonl"))
    cluster.heap.run_until(cluster.heap.now_us + 2 * SPEC.lease_us)
    for worker in cluster.workers:
        counts = worker.pool.counts()
        assert counts.free + counts.cached == counts.total
        worker.core.check()


@pytest.mark.parametrize("policy", ["segue", "random", "mooncake"])
def test_the_same_seed_gives_the_same_bytes(policy: str) -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    first, second, other = (msgspec.json.encode(figures(workload, policy, noise=0.1, seed=seed)) for seed in (3, 3, 4))
    assert first == second != other


def test_many_steps_at_once_change_nothing_but_the_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = independent(4.0, 30, 1, Lengths(median=800, sigma=0.5), Lengths(median=60, sigma=0.5))
    jumping = figures(workload)
    monkeypatch.setattr("simulator.cluster.STEPS_MAX", 1)
    stepping = figures(workload)
    assert jumping.events < stepping.events / 2
    assert jumping.ttft_mean_s == pytest.approx(stepping.ttft_mean_s, rel=0.02)
    assert jumping.tpot_mean_ms == pytest.approx(stepping.tpot_mean_ms, rel=0.02)


def test_a_second_prompt_of_a_group_hits_the_prefix_of_the_first() -> None:
    workload = shared_prefix_groups([(0.5, 60.0)], seed=1, groups=1, users=1, output_tokens=5)
    summary = figures(workload, block_size=16 * 25, prefill=1)
    assert summary.hit_rate > 0.9 * summary.hit_rate_max > 0.8


def test_random_routing_finds_fewer_prefixes_than_ours() -> None:
    workload = shared_prefix_groups([(2.0, 60.0)], seed=1, groups=10, users=2, output_tokens=20)
    ours, drawn = (figures(workload, policy, prefill=4, block_size=400) for policy in ("segue", "random"))
    assert ours.hit_rate > drawn.hit_rate + 0.1
    assert ours.ttft_mean_s < drawn.ttft_mean_s


def test_continuous_batching_shares_a_step() -> None:
    """Eight sequences at once take hardly longer than one; one after the other they would take eight times as long."""
    alone = figures(one(64, 200), prefill=1, decode=1).virtual_s
    together = Workload(name="eight", requests=[WorkloadRequest(0, 64 + n, 200) for n in range(8)])
    assert figures(together, prefill=1, decode=1).virtual_s < 1.2 * alone


def test_aggregated_instances_prefill_and_decode() -> None:
    summary = figures(read_trace(DATA / "conversation_60.jsonl"), prefill=0, decode=0, aggregated=4)
    assert (summary.completed, summary.bytes_moved) == (60, 0.0)


def test_several_conductors_share_the_instances() -> None:
    summary = figures(read_trace(DATA / "conversation_60.jsonl"), conductors=3, view_delay_us=100_000)
    assert (summary.completed, summary.failed) == (60, 0)


def test_a_policy_that_predicts_refuses_what_would_be_late() -> None:
    workload = Workload(name="crowd", requests=[WorkloadRequest(0, 10_000, 5) for _ in range(20)])
    summary = figures(workload, "mooncake", prefill=1, refuse_ttft_us=1_000_000.0)
    assert (summary.rejected, summary.completed) == (16, 4)
    assert summary.tokens_prefilled == 40_000


def test_a_fetched_prefix_is_not_computed_again() -> None:
    ids = tuple(range(20))
    requests = [WorkloadRequest(0, 10_240, 2, ids)]
    requests += [WorkloadRequest(3_000_000 + n, 10_240, 2, (*ids[:19], 100 + n)) for n in range(4)]
    summary = figures(Workload(name="fetch", requests=requests), "mooncake", prefill=4)
    assert summary.tokens_prefilled < 10_240 + 4 * 1_200
    assert summary.bytes_moved > 2 * 19 * 512 * 1_000
