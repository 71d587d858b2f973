"""Mooncake's three forms of admission by their published rules, and ours beside them under a small overload."""

from __future__ import annotations

import random

import pytest

from conductor.core.admission import Objectives
from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from simulator.cluster import Cluster, ClusterSpec
from simulator.generators import Lengths, independent
from simulator.report import RunSummary, Slo, summarise
from simulator.workload import Workload, WorkloadRequest

COST = CostModel(
    prefill=PrefillCost(base_us=500.0, token_us=200.0, pair_us=0.0),
    decode=DecodeCost(base_us=20_000.0, row_us=400.0, kv_token_us=0.0),
    kv_token_bytes=1_000,
)
TTFT_US, TPOT_US = 4e6, 26_000.0
"""Fifteen rows make a step of 26 ms; 4,000 tokens take 0.8 s."""


def overload(seconds: float = 30.0) -> Workload:
    """Quiet, then twice what one D can take, then quiet."""
    draw, requests, at_s = random.Random(1), [], 0.0
    prompt, output = Lengths(median=4_000, sigma=0.3), Lengths(median=100, sigma=0.4)
    while at_s < seconds:
        at_s += draw.expovariate(12.0 if seconds / 4 < at_s < 3 * seconds / 4 else 2.0)
        requests.append(WorkloadRequest(round(at_s * 1e6), prompt.draw(draw), output.draw(draw)))
    return Workload(name="overload", requests=requests)


def spec(policy: str, **changes: object) -> ClusterSpec:
    ours = Objectives(ttft_us=TTFT_US, ttft_factor=0.0, tpot_us=TPOT_US)
    settings: dict[str, object] = {
        "prefill": 8,
        "decode": 1,
        "cost": COST,
        "link": LinkCost(latency_us=50.0, bytes_per_us=10_000.0),
        "kv_tokens": 400_000,
        "block_size": 64,
        "objectives": ours if policy == "segue" else None,
        "refuse_ttft_us": TTFT_US,
        "refuse_tpot_us": TPOT_US,
        "uniform_decode_us": 2.6e6,
    }
    return ClusterSpec(**{**settings, **changes})  # type: ignore[arg-type]


def run(policy: str, workload: Workload, **changes: object) -> Cluster:
    cluster = Cluster(spec(policy, **changes), workload, policy)
    cluster.run()
    return cluster


def figures(policy: str, workload: Workload, **changes: object) -> RunSummary:
    slo = Slo(ttft_us=TTFT_US, ttft_factor=0.0, tpot_us=TPOT_US)
    return summarise(run(policy, workload, **changes), policy, slo)


def test_our_admission_wastes_nothing_and_keeps_its_word_under_overload() -> None:
    summary = figures("segue", overload())
    assert summary.rejected > 0.2 * summary.offered
    assert summary.attainment_accepted >= 0.95
    assert summary.tokens_wasted < 0.01 * summary.tokens_prefilled
    assert summary.failed == 0


def test_with_noise_the_bounds_hold_as_often_as_they_claim() -> None:
    steady = independent(4.0, 500, 1, Lengths(median=4_000, sigma=0.3), Lengths(median=100, sigma=0.4))
    cluster = run("segue", steady, noise=0.1)
    conductor = cluster.conductor("conductor-0")
    assert conductor is not None
    coverages = {each.kind: each.coverage for each in conductor.core.forecast.coverages()}
    for kind in ("prefill", "ttft", "tpot"):
        assert coverages[kind] == pytest.approx(0.9, abs=0.02), kind


def test_without_admission_the_same_load_misses_its_objectives() -> None:
    workload = overload(20.0)
    assert figures("segue", workload, objectives=None).attainment < figures("segue", workload).attainment


def test_the_baseline_finds_out_at_landing_and_has_prefilled_for_nothing() -> None:
    summary = figures("mooncake-baseline", overload())
    assert summary.rejected > 0
    assert summary.tokens_wasted > 0.05 * summary.tokens_prefilled


@pytest.mark.parametrize("policy", ["mooncake-early", "mooncake-predicted"])
def test_early_rejection_wastes_nothing(policy: str) -> None:
    summary = figures(policy, overload())
    assert summary.rejected > 0
    assert summary.tokens_wasted == 0


def test_a_second_look_at_landing_keeps_the_objective_and_wastes_prefills() -> None:
    once, twice = (figures(policy, overload()) for policy in ("mooncake-early", "mooncake-early-checked"))
    assert once.tokens_wasted == 0 < twice.tokens_wasted
    assert twice.attainment_accepted > once.attainment_accepted


def test_the_load_of_the_moment_does_not_see_the_pipeline() -> None:
    """Forty at once find an idle D: early rejection takes them all, the prediction only what fits at landing."""
    crowd = Workload(name="crowd", requests=[WorkloadRequest(1_500_000, 4_000, 100) for _ in range(30)])
    early, predicted = (figures(policy, crowd) for policy in ("mooncake-early", "mooncake-predicted"))
    assert early.rejected == 0
    assert predicted.rejected > 0
    assert predicted.tpot_p99_ms < early.tpot_p99_ms


def test_the_queue_of_a_flooding_tenant_is_its_own() -> None:
    """Two tenants, one of which sends ten times as much as fits: the other one is hardly ever rejected."""
    draw, requests = random.Random(2), []
    for n in range(300):
        requests.append(WorkloadRequest(round(n * 1e5), 4_000, Lengths(median=100).draw(draw), group="flood"))
        if n % 20 == 0:
            requests.append(WorkloadRequest(round(n * 1e5) + 1, 4_000, 100, group="quiet"))
    workload = Workload(name="tenants", requests=requests)
    cluster = run("segue", workload, tenants=True)
    ended = {tenant: [] for tenant in ("flood", "quiet")}  # type: ignore[var-annotated]
    for index, seen in cluster.fronts[0].observed.items():
        ended[requests[index].group].append(seen.end.value == "completed")
    assert sum(ended["quiet"]) >= 0.9 * len(ended["quiet"])
    assert sum(ended["flood"]) < 0.8 * len(ended["flood"])
