"""Claim C5: requests rejected under overload by Mooncake's admission in its three forms.

python benchmarks/simulator_early_rejection.py TRACE [--count 0] [--speedup 2] [--mbu 0.14]

LLaMA2-70B on 8P + 8D nodes of 8 x A800, a trace of 23,608 requests at twice its speed, objectives of the paper (TTFT
30 s, TBT 0.1 s), nodes as in `simulator_schedulers.py`. One parameter of decoding is fitted: the share of memory
bandwidth that a step reaches, by bisection until the baseline rejects 18.2 % (4,183 of 23,000). The others are
predicted with it. Published: 4,183 rejected by the baseline, 3,771 by early rejection, 3,589 with prediction. The trace
is a stand-in for theirs, so shares are compared, not counts. `--mbu` takes a share that was fitted before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import msgspec
from result_rows import RESULTS, ResultFile
from simulator_claim_figures import loads_over_time, save
from simulator_schedulers import KV_TOKENS, LINK, MFU

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
TTFT_US, TBT_US = 30e6, 100e3
REPORT_US = 200_000
"""Decode load is as old as the last report: with one a second all requests of that second would choose the same D."""
MBU_RANGE = (0.1, 0.2)
"""At 0.1 the weights alone take 85 ms a step, at 0.2 the offered load leaves a D's step at 70 ms."""
FITTED = 0.01
"""Bisection ends when the baseline's share is as near as this to what was published."""
STEPS_MAX = 5
SHOWN_S = 900
"""Of the figure: swings of a minute cannot be seen in half an hour."""


def spec(mbu: float, workload: Workload) -> ClusterSpec:
    node = Instance(model="llama2-70b", node="a800", accelerators=8, mfu=MFU)
    cost = node.cost_model()
    slow = msgspec.structs.replace(node, mbu=mbu).cost_model().decode
    return ClusterSpec(
        prefill=8,
        decode=8,
        cost=msgspec.structs.replace(cost, decode=slow),
        link=LINK,
        kv_tokens=KV_TOKENS,
        block_size=512,
        report_us=REPORT_US,
        refuse_ttft_us=TTFT_US,
        refuse_tpot_us=TBT_US,
        uniform_decode_us=mean(request.tokens_output for request in workload.requests) * TBT_US,
    )


class Run:
    """One policy's figures, and its loads over time while requests arrived."""

    def __init__(self, policy: str, mbu: float, workload: Workload) -> None:
        cluster = Cluster(spec(mbu, workload), workload, policy)
        sampler = LoadSampler(cluster)
        cluster.run()
        self.figures: RunSummary = summarise(cluster, policy, Slo(ttft_us=TTFT_US, ttft_factor=0.0, tpot_us=TBT_US))
        self.loads = sampler.samples
        self.swing: Swing = sampler.swing(lambda at_s: at_s < workload.duration_us / 1e6)
        ended = [each for front in cluster.fronts for each in front.observed.values() if each.end is End.REJECTED]
        self.rejected_for_ttft = sum(each.reason.startswith("TTFT") for each in ended)
        self.rejected = self.figures.rejected / self.figures.offered


def fit_mbu(workload: Workload) -> float:
    """The share of bandwidth at which the baseline rejects what was published: it rejects less the higher it is."""
    low, high = MBU_RANGE
    for _ in range(STEPS_MAX):
        middle = (low + high) / 2
        baseline = Run("mooncake-baseline", middle, workload)
        print(
            f"MBU {middle:.4f}: {baseline.rejected:.1%} rejected, "
            f"{baseline.rejected_for_ttft} of {baseline.figures.rejected} for TTFT",
            flush=True,
        )
        if abs(baseline.rejected - BASELINE_REJECTED) <= FITTED:
            return middle
        low, high = (middle, high) if baseline.rejected > BASELINE_REJECTED else (low, middle)
    return (low + high) / 2


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
    parser.add_argument("--mbu", type=float, default=0.0, help="share of memory bandwidth in decode steps; 0: fit it")
    parser.add_argument("--plot", type=Path, help="PNG of both loads over time")
    asked = parser.parse_args()
    workload = with_bursts_spread(sliced(read_trace(asked.trace), count=asked.count or None))
    workload = sped_up(workload, asked.speedup)
    command = f"simulator_early_rejection.py {asked.trace.name} --count {asked.count} --speedup {asked.speedup:g}"
    command += f" --mbu {asked.mbu:g}" if asked.mbu else ""
    results = ResultFile(
        RESULTS / "simulator_early_rejection.csv", device="simulated 8P + 8D x (8 A800)", command=command
    )
    mbu = asked.mbu or fit_mbu(workload)
    results.add("fitted to the baseline", "MBU of decode steps", mbu, "share")
    loads, titles = {}, {}
    for policy, published in PUBLISHED.items():
        run = Run(policy, mbu, workload)
        write(results, policy, run, published)
        loads[policy] = run.loads
        titles[policy] = f"{policy}: {run.rejected:.1%} rejected, correlation of P and D {run.swing.correlation:+.2f}"
    if asked.plot is not None:
        last_s = min(SHOWN_S, workload.duration_us / 1e6)
        save(loads_over_time(loads, titles, TTFT_US / 1e6, TBT_US / 1e3, last_s), asked.plot)


if __name__ == "__main__":
    main()
