"""Claim C5: requests rejected under overload by Mooncake's admission in its three forms.

python benchmarks/simulator_early_rejection.py TRACE [--count 4000] [--speedup 2]

LLaMA2-70B on 8P + 8D nodes of 8 x A800, a trace of 23,608 requests at twice its speed. One parameter is fitted: the
limit of TBT, by bisection until the baseline rejects 18.2 % (4,183 of 23,000). The others are predicted with it.
Published: 4,183 rejected by the baseline, 3,771 by early rejection, 3,589 with prediction.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from result_rows import RESULTS, ResultFile

from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.report import RunSummary, Slo, summarise
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up, with_bursts_spread

BASELINE_REJECTED = 0.182
PUBLISHED = {"mooncake-baseline": 4_183, "mooncake-early": 3_771, "mooncake-predicted": 3_589}
PUBLISHED_OFFERED = 23_000
TTFT_US = 30e6
STEPS = 5


def spec(tbt_us: float, workload: Workload) -> ClusterSpec:
    node = Instance(model="llama2-70b", node="a800", accelerators=8)
    cost = node.cost_model()
    step_us = cost.decode.us(32, 32 * 8_000)
    return ClusterSpec(
        prefill=8,
        decode=8,
        cost=cost,
        link=node.network(),
        kv_tokens=node.kv_tokens_total(),
        block_size=512,
        refuse_ttft_us=TTFT_US,
        refuse_tpot_us=tbt_us,
        uniform_decode_us=mean(request.tokens_output for request in workload.requests) * step_us,
    )


def run(policy: str, tbt_us: float, workload: Workload) -> RunSummary:
    cluster = Cluster(spec(tbt_us, workload), workload, policy)
    cluster.run()
    return summarise(cluster, policy, Slo(ttft_us=TTFT_US, tpot_us=tbt_us))


def fit_tbt_us(workload: Workload) -> float:
    """The limit at which the baseline rejects what was published: it rejects less the higher the limit."""
    base_us = spec(1.0, workload).cost.decode.base_us
    low_us, high_us = base_us, 3.0 * base_us
    for _ in range(STEPS):
        middle_us = (low_us + high_us) / 2
        figures = run("mooncake-baseline", middle_us, workload)
        share = figures.rejected / figures.offered
        print(f"TBT limit {middle_us / 1e3:.2f} ms: {share:.1%} rejected", flush=True)
        low_us, high_us = (middle_us, high_us) if share > BASELINE_REJECTED else (low_us, middle_us)
    return (low_us + high_us) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--count", type=int, default=4_000, help="requests from the start; 0: all")
    parser.add_argument("--speedup", type=float, default=2.0)
    asked = parser.parse_args()
    workload = with_bursts_spread(sliced(read_trace(asked.trace), count=asked.count or None))
    workload = sped_up(workload, asked.speedup)
    command = f"simulator_early_rejection.py {asked.trace.name} --count {asked.count} --speedup {asked.speedup:g}"
    results = ResultFile(
        RESULTS / "simulator_early_rejection.csv", device="simulated 8P + 8D x (8 A800)", command=command
    )
    tbt_us = fit_tbt_us(workload)
    results.add("fitted to the baseline", "TBT limit", tbt_us / 1e3, "ms")
    for policy, published in PUBLISHED.items():
        figures = run(policy, tbt_us, workload)
        results.add(policy, "rejected", figures.rejected / figures.offered, "share")
        results.add(policy, "published", published / PUBLISHED_OFFERED, "share")
        results.add(policy, "wasted prefill", figures.tokens_wasted / max(figures.tokens_prefilled, 1), "share")
        results.add(policy, "correlation of P and D", figures.load_correlation, "")


if __name__ == "__main__":
    main()
