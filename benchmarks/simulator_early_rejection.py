"""Claim C5: requests rejected under overload by Mooncake's admission in its three forms.

python benchmarks/simulator_early_rejection.py TRACE [--count 0] [--speedup 2] [--tbt-ms 17.2]

LLaMA2-70B on 8P + 8D nodes of 8 x A800, a trace of 23,608 requests at twice its speed. One parameter is fitted: the
limit of TBT, by bisection until the baseline rejects 18.2 % (4,183 of 23,000). The others are predicted with it.
Published: 4,183 rejected by the baseline, 3,771 by early rejection, 3,589 with prediction. The trace is a stand-in for
theirs, so shares are compared, not counts. `--tbt-ms` takes a limit that was fitted before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from result_rows import RESULTS, ResultFile
from simulator_claim_figures import loads_over_time, save

from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.load_sampler import LoadSampler, Swing
from simulator.report import RunSummary, Slo, summarise
from simulator.trace_front import End
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up, with_bursts_spread

BASELINE_REJECTED = 0.182
PUBLISHED = {
    "mooncake-baseline": 4_183,
    "mooncake-early-checked": 3_771,
    "mooncake-predicted-checked": 3_589,
    "mooncake-early": 3_771,
    "mooncake-predicted": 3_589,
}
"""By form; with and without a second look at landing, of which the paper does not say whether it was taken."""
PUBLISHED_OFFERED = 23_000
TTFT_US = 30e6
FITTED = 0.002
"""Bisection ends when the baseline's share is as near as this to what was published."""
STEPS_MAX = 6
SHOWN_S = 900
"""Of the figure: swings of a minute cannot be seen in half an hour."""


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


class Run:
    """One policy's figures, and its loads over time while requests arrived."""

    def __init__(self, policy: str, tbt_us: float, workload: Workload) -> None:
        cluster = Cluster(spec(tbt_us, workload), workload, policy)
        sampler = LoadSampler(cluster)
        cluster.run()
        self.figures: RunSummary = summarise(cluster, policy, Slo(ttft_us=TTFT_US, ttft_factor=0.0, tpot_us=tbt_us))
        self.loads = sampler.samples
        self.swing: Swing = sampler.swing(lambda at_s: at_s < workload.duration_us / 1e6)
        ended = [each for front in cluster.fronts for each in front.observed.values() if each.end is End.REJECTED]
        self.rejected_for_ttft = sum(each.reason.startswith("TTFT") for each in ended)
        self.rejected = self.figures.rejected / self.figures.offered


def fit_tbt_us(workload: Workload) -> float:
    """The limit at which the baseline rejects what was published: it rejects less the higher the limit."""
    base_us = spec(1.0, workload).cost.decode.base_us
    low_us, high_us = base_us, 3.0 * base_us
    for _ in range(STEPS_MAX):
        middle_us = (low_us + high_us) / 2
        baseline = Run("mooncake-baseline", middle_us, workload)
        print(
            f"TBT limit {middle_us / 1e3:.2f} ms: {baseline.rejected:.1%} rejected, "
            f"{baseline.rejected_for_ttft} of {baseline.figures.rejected} for TTFT",
            flush=True,
        )
        if abs(baseline.rejected - BASELINE_REJECTED) <= FITTED:
            return middle_us
        low_us, high_us = (middle_us, high_us) if baseline.rejected > BASELINE_REJECTED else (low_us, middle_us)
    return (low_us + high_us) / 2


def write(results: ResultFile, policy: str, run: Run, published: int) -> None:
    figures = run.figures
    results.add(policy, "rejected", run.rejected, "share")
    results.add(policy, "published", published / PUBLISHED_OFFERED, "share")
    results.add(policy, "of them for TTFT", run.rejected_for_ttft / max(figures.rejected, 1), "share")
    results.add(policy, "wasted prefill", figures.tokens_wasted / max(figures.tokens_prefilled, 1), "share")
    results.add(policy, "attainment of offered", figures.attainment, "share")
    results.add(policy, "P busy", figures.utilisation_prefill, "share")
    results.add(policy, "D busy", figures.utilisation_decode, "share")
    results.add(policy, "deviation of P's queue", run.swing.waiting_s, "s")
    results.add(policy, "deviation of D's step", run.swing.step_ms, "ms")
    results.add(policy, "correlation of P and D", run.swing.correlation, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--count", type=int, default=0, help="requests from the start; 0: all")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--tbt-ms", type=float, default=0.0, help="limit of TBT; 0: fit it")
    parser.add_argument("--plot", type=Path, help="PNG of both loads over time")
    asked = parser.parse_args()
    workload = with_bursts_spread(sliced(read_trace(asked.trace), count=asked.count or None))
    workload = sped_up(workload, asked.speedup)
    command = f"simulator_early_rejection.py {asked.trace.name} --count {asked.count} --speedup {asked.speedup:g}"
    command += f" --tbt-ms {asked.tbt_ms:g}" if asked.tbt_ms else ""
    results = ResultFile(
        RESULTS / "simulator_early_rejection.csv", device="simulated 8P + 8D x (8 A800)", command=command
    )
    tbt_us = asked.tbt_ms * 1e3 or fit_tbt_us(workload)
    results.add("fitted to the baseline", "TBT limit", tbt_us / 1e3, "ms")
    loads, titles = {}, {}
    for policy, published in PUBLISHED.items():
        run = Run(policy, tbt_us, workload)
        write(results, policy, run, published)
        loads[policy] = run.loads
        titles[policy] = f"{policy}: {run.rejected:.1%} rejected, correlation of P and D {run.swing.correlation:+.2f}"
    if asked.plot is not None:
        last_s = min(SHOWN_S, workload.duration_us / 1e6)
        save(loads_over_time(loads, titles, TTFT_US / 1e6, tbt_us / 1e3, last_s), asked.plot)


if __name__ == "__main__":
    main()
