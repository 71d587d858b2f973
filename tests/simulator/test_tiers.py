"""Memory below the GPU: what goes down, what comes up, how long it takes, and what the report says of it."""

from __future__ import annotations

import pytest

from simulator.cluster import Cluster, ClusterSpec, check_spec
from simulator.hardware import Instance
from simulator.report import Slo, summarise
from simulator.tiers import LowerTiers, TierSpec
from simulator.workload import Workload, WorkloadRequest

DRAM = TierSpec(name="dram", tokens=32, bytes_per_us=10.0, latency_us=5.0)
SSD = TierSpec(name="ssd", tokens=64, bytes_per_us=1.0, latency_us=50.0)
BLOCKS = [bytes([number]) * 16 for number in range(8)]


def tiers() -> LowerTiers:
    return LowerTiers([DRAM, SSD], block_size=16, block_bytes=100)


def test_the_oldest_goes_down_a_tier_and_then_away() -> None:
    lower = tiers()
    lower.put(BLOCKS[:7])
    assert [len(lower.locate([block])) for block in BLOCKS] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert lower.names(lower.locate(BLOCKS[1:7])) == {"dram": 2, "ssd": 4}


def test_only_a_prefix_without_holes_is_found() -> None:
    lower = tiers()
    lower.put([BLOCKS[0], BLOCKS[2]])
    assert lower.locate(BLOCKS[:3]) == [0]


def test_a_block_that_is_used_stays_longer() -> None:
    lower = LowerTiers([DRAM], block_size=16, block_bytes=100)
    lower.put(BLOCKS[:2])
    lower.locate(BLOCKS[:1])
    lower.put([BLOCKS[2]])
    assert lower.locate([BLOCKS[0]]) == [0] and lower.locate([BLOCKS[1]]) == []


def test_a_tier_reads_for_one_request_after_the_other_and_tiers_side_by_side() -> None:
    lower = tiers()
    assert lower.read([0, 0], 1_000) == 1_000 + 5 + 20
    assert lower.read([0], 1_000) == 1_025 + 5 + 10
    assert lower.read([0, 1], 2_000) == 2_000 + 50 + 100


@pytest.mark.parametrize(
    ("tier", "complaint"), [({"tokens": 15}, "are not one block of 16"), ({"bytes_per_us": 0.0}, "nothing is read")]
)
def test_a_tier_that_can_serve_nothing_is_refused(tier: dict[str, float], complaint: str) -> None:
    spec = TierSpec(**{"name": "dram", "tokens": 16, "bytes_per_us": 1.0} | tier)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        check_spec(cluster_spec(block_size=16, tiers=(spec,)))


def cluster_spec(**changes: object) -> ClusterSpec:
    instance = Instance(model="llama3-70b", node="h200", accelerators=1, weights="fp8", kv="fp8")
    fields = {"cost": instance.cost_model(), "link": instance.network(), "kv_tokens": 9_216, "tokens_output_max": 64}
    return ClusterSpec(prefill=1, decode=1, **fields | changes)  # type: ignore[arg-type]


def two_prompts_that_drive_each_other_out() -> Workload:
    """Each is 16 of the 18 blocks that the GPU holds; they take turns."""
    requests = [
        WorkloadRequest(number * 20_000_000, 8_192, 4, tuple(range(number % 2 * 16, number % 2 * 16 + 16)))
        for number in range(6)
    ]
    return Workload(name="turns", requests=requests)


def test_prompts_that_left_the_gpu_come_up_again_and_are_reported_by_tier() -> None:
    workload = two_prompts_that_drive_each_other_out()
    results = {}
    for listed in ((), (("dram", 16_384),), (("dram", 4_096), ("ssd", 16_384))):
        tier_specs = tuple(TierSpec(name=name, tokens=tokens, bytes_per_us=50_000.0) for name, tokens in listed)
        cluster = Cluster(cluster_spec(tiers=tier_specs), workload)
        cluster.run()
        results[len(listed)] = summarise(cluster, "segue", Slo())
    none, dram, both = (results[number] for number in range(3))
    assert dram.hit_rate > none.hit_rate + 0.3 and dram.tokens_prefilled < none.tokens_prefilled
    assert none.hit_rate_tiers["dram"] == 0 and dram.hit_rate_tiers["dram"] > 0.4
    assert both.hit_rate_tiers["ssd"] > 0.1
    assert sum(both.hit_rate_tiers.values()) == pytest.approx(both.hit_rate)
    assert 0 < dram.ttft_fetch_s < dram.ttft_queue_s < none.ttft_mean_s
