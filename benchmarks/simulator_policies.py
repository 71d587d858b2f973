"""Routing policies on a slice of a trace: 8 prefill and 8 decode instances of LLaMA3-70B in FP8 on one H200 each.

    python benchmarks/simulator_policies.py TRACE --start 1000 --count 1500 --speedup 1 1.5 --policies segue dynamo

Objectives: TTFT within 2 s or three times the unloaded prefill, TPOT within 50 ms. Bursts are replayed as recorded.
Attainment is over all offered requests; with `--reject` the Conductor rejects what it predicts to miss the objectives,
whatever policy ranks, without it nobody rejects anything.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from result_rows import RESULTS, ResultFile

from conductor.core.admission import Objectives
from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.policies import POLICIES
from simulator.report import RunSummary, Slo, summarise
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up

INSTANCE = Instance(model="llama3-70b", node="h200", accelerators=1, weights="fp8", kv="fp8")


def run(workload: Workload, policy: str, conductors: int, view_delay_us: int, *, reject: bool = False) -> RunSummary:
    slo = Slo()
    spec = ClusterSpec(
        cost=INSTANCE.cost_model(),
        link=INSTANCE.network(),
        kv_tokens=INSTANCE.kv_tokens_total(),
        block_size=max(16, workload.span_tokens),
        conductors=conductors,
        view_delay_us=view_delay_us,
        objectives=Objectives(ttft_us=slo.ttft_us, ttft_factor=slo.ttft_factor, tpot_us=slo.tpot_us)
        if reject
        else None,
        seed=1,
    )
    cluster = Cluster(spec, workload, policy)
    cluster.run()
    return summarise(cluster, policy, slo)


def write(file: ResultFile, shape: str, summary: RunSummary) -> None:
    file.add(shape, "attainment", summary.attainment, "share of offered")
    file.add(shape, "goodput", summary.goodput_per_s, "requests/s")
    file.add(shape, "ttft mean", summary.ttft_mean_s, "s")
    file.add(shape, "ttft p90", summary.ttft_p90_s, "s")
    file.add(shape, "tpot mean", summary.tpot_mean_ms, "ms")
    file.add(shape, "hit rate", summary.hit_rate, f"share, at most {summary.hit_rate_max:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_500)
    parser.add_argument("--speedup", type=float, nargs="+", default=[1.0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--conductors", type=int, default=1)
    parser.add_argument("--view-delay-us", type=int, default=0)
    parser.add_argument("--reject", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulator_policies.csv")
    args = parser.parse_args()
    named = ["TRACE" if Path(word) == args.trace else word for word in sys.argv[1:]]
    command = " ".join(["python", "benchmarks/simulator_policies.py", *named])
    file = ResultFile(args.out, device="simulated 16 x H200", command=command)
    trace = sliced(read_trace(args.trace, "auto"), start=args.start, count=args.count)
    trace = msgspec.structs.replace(trace, name=args.trace.stem)
    for speedup in args.speedup:
        workload = sped_up(trace, speedup)
        for policy in args.policies:
            summary = run(workload, policy, args.conductors, args.view_delay_us, reject=args.reject)
            where = f"{args.trace.stem} {args.start}+{args.count} x{speedup:g}, {summary.offered_per_s:.2f}/s"
            views = f", {args.conductors} conductors, views {args.view_delay_us / 1000:g} ms old"
            admission = " with admission" if args.reject else ""
            write(
                file,
                f"{policy}{admission}, {where}{views if args.conductors > 1 or args.view_delay_us else ''}",
                summary,
            )


if __name__ == "__main__":
    main()
