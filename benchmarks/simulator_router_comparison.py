"""Claim C6: routing policies on shared-prefix groups, 8 aggregated instances of Qwen3-32B on two H100s each.

    python benchmarks/simulator_router_comparison.py POLICY,... QPS,... SECONDS [SEED [OUT]]

Every rate starts on a cluster that has seen `WARM_S` seconds of `WARM_QPS`; its own requests alone are counted. All
policies see load reports every `REPORT_US`, which is how often llm-d reads the metrics of its pods.
"""

from __future__ import annotations

import sys
from pathlib import Path

from result_rows import RESULTS, ResultFile

from simulator.cluster import Cluster, ClusterSpec
from simulator.generators import shared_prefix_groups
from simulator.hardware import Instance
from simulator.trace_front import End

WARM_QPS, WARM_S = 3.0, 60.0
REPORT_US = 50_000


def mean_ttft_s(policy: str, qps: float, seconds: float, seed: int) -> tuple[float, float, int]:
    """(mean TTFT, hit rate, requests)."""
    workload = shared_prefix_groups([(WARM_QPS, WARM_S), (qps, seconds)], seed)
    instance = Instance(model="qwen3-32b", node="h100", accelerators=2)
    spec = ClusterSpec(
        prefill=0,
        decode=0,
        aggregated=8,
        cost=instance.cost_model(),
        link=instance.network(),
        kv_tokens=307_328,
        block_size=workload.span_tokens // 5,
        report_us=REPORT_US,
        seed=seed,
    )
    cluster = Cluster(spec, workload, policy)
    cluster.run()
    seen = [each for front in cluster.fronts for each in front.observed.values() if each.end is End.COMPLETED]
    counted = [each for each in seen if each.arrival_us >= WARM_S * 1e6]
    ttft_s = sum(each.first_token_us - each.arrival_us for each in counted) / len(counted) / 1e6
    return ttft_s, sum(e.tokens_cached for e in counted) / sum(e.tokens_prompt for e in counted), len(counted)


def main(policies: str, rates: str, seconds: str, seed: str = "1", out: str = "") -> None:
    path = Path(out) if out else RESULTS / "simulator_c6.csv"
    for policy in policies.split(","):
        for qps in rates.split(","):
            command = f"python benchmarks/simulator_router_comparison.py {policy} {qps} {seconds} {seed}"
            file = ResultFile(path, device="simulated 8 x (2 H100)", command=command)
            ttft_s, hit_rate, count = mean_ttft_s(policy, float(qps), float(seconds), int(seed))
            shape = f"{policy}, {qps} QPS, {count} requests"
            file.add(shape, "mean ttft", ttft_s, "s")
            file.add(shape, "hit rate", hit_rate, "share")


if __name__ == "__main__":
    main(*sys.argv[1:])
