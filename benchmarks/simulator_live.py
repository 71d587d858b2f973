"""Live against simulated: a local cluster of 2P + 2D replays a slice of a trace, and the simulator predicts it.

python benchmarks/simulator_live.py CONVERSATION_TRACE [--start 1000] [--count 100] [--speedup 0.3]

The cluster is real but for the arithmetic of its model: Conductor, gateway, workers, hand-off through shared memory and
clients over gRPC are what is served; a toy engine pads each step to the time that the cost model below gives it
(`live_paced_engine.py`). Prompts are a sixteenth of the trace's and answers an eighth, so that steps of a tenth of a
second suffice and the noise of a shared machine stays small beside them. The same slice, cost model and limits
then run in the simulator. Each policy is measured in a cluster of its own.

Rows: TTFT and TPOT live and simulated, the error of each, the median error over requests, and by how much the engines'
steps were late because the machine was busy (with its load average): a large figure voids the comparison.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import mean, median, quantiles

import msgspec
from live_cluster import COST, LINK, Measured, Shape, replay
from result_rows import RESULTS, ResultFile, cpu_device

from simulator.cluster import Cluster, ClusterSpec
from simulator.series import tpot_us
from simulator.trace_front import End
from simulator.traces import read_trace
from simulator.workload import Workload, WorkloadRequest, sliced, sped_up, with_bursts_spread

POLICIES = ("segue", "round-robin")
PROMPT_SCALE, OUTPUT_SCALE = 16, 8
SHAPE = Shape(prefill=2, decode=2, block_size=32, pages=2_048, max_num_seqs=32, max_num_batched_tokens=512)


def scaled(workload: Workload) -> Workload:
    """Lengths divided; prefix ids name spans a sixteenth as long, so that what was shared still is."""
    requests = [
        msgspec.structs.replace(
            request,
            tokens_prompt=-(-request.tokens_prompt // PROMPT_SCALE),
            tokens_output=max(2, request.tokens_output // OUTPUT_SCALE),
        )
        for request in workload.requests
    ]
    return msgspec.structs.replace(workload, requests=requests, span_tokens=workload.span_tokens // PROMPT_SCALE)


def simulate(workload: Workload, policy: str) -> list[Measured]:
    spec = ClusterSpec(
        prefill=SHAPE.prefill,
        decode=SHAPE.decode,
        cost=COST,
        link=LINK,
        kv_tokens=SHAPE.pages * SHAPE.block_size,
        block_size=SHAPE.block_size,
        max_num_seqs=SHAPE.max_num_seqs,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        max_model_len=SHAPE.max_model_len,
        tokens_output_max=0,
        fetches=False,
    )
    cluster = Cluster(spec, workload, policy)
    cluster.run()
    seen = [cluster.fronts[0].observed[index] for index in range(len(workload.requests))]
    assert all(each.end is End.COMPLETED for each in seen), "a simulated request failed"
    return [
        Measured((e.first_token_us - e.arrival_us) / 1e6, tpot_us(e) / 1e3, e.tokens_cached, e.prefill, e.decode)
        for e in seen
    ]


def print_requests(workload: Workload, live: list[Measured], simulated: list[Measured]) -> None:
    """Each request in both worlds."""
    for request, one, other in zip(workload.requests, live, simulated, strict=True):
        print(
            f"{request.arrival_us / 1e6:7.2f} s {request.tokens_prompt:5} + {request.tokens_output:3} tokens | "
            + " | ".join(
                f"{e.prefill:>9} {e.decode:>9} cached {e.tokens_cached:5} TTFT {e.ttft_s:6.3f} TPOT {e.tpot_ms:6.1f}"
                for e in (one, other)
            )
        )


def compare(results: ResultFile, policy: str, live: list[Measured], simulated: list[Measured]) -> None:
    for metric, unit in (("ttft_s", "s"), ("tpot_ms", "ms")):
        pair = [[getattr(each, metric) for each in side] for side in (live, simulated)]
        for name, figure in (("mean", mean), ("p50", median), ("p90", lambda values: quantiles(values, n=10)[8])):
            measured, predicted = figure(pair[0]), figure(pair[1])
            shape = f"{policy}, {metric} {name}"
            results.add(shape, "live", measured, unit)
            results.add(shape, "simulated", predicted, unit)
            results.add(shape, "error", predicted / measured - 1.0, "share")
        errors = [abs(predicted / measured - 1.0) for measured, predicted in zip(*pair, strict=True)]
        results.add(f"{policy}, {metric}", "median error of a request", median(errors), "share")
    for side, samples in (("live", live), ("simulated", simulated)):
        results.add(policy, f"{side} cached tokens", str(sum(each.tokens_cached for each in samples)), "tokens")


def ranking(results: ResultFile, measured: dict[str, tuple[list[Measured], list[Measured]]]) -> None:
    """How much shorter the mean TTFT is than by the last policy, in each world."""
    (first, *_, last) = measured
    for side, name in enumerate(("live", "simulated")):
        ratio = mean(e.ttft_s for e in measured[last][side]) / mean(e.ttft_s for e in measured[first][side])
        results.add(f"{last} over {first}, ttft mean", name, ratio, "ratio")


def with_answers(workload: Workload) -> Workload:
    """TPOT needs two tokens; arrivals start at 0."""
    requests: list[WorkloadRequest] = [each for each in workload.requests if each.tokens_prompt < SHAPE.max_model_len]
    return msgspec.structs.replace(workload, requests=requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--start", type=int, default=1_000)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--speedup", type=float, default=0.3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--simulate-only", action="store_true", help="print what the simulator expects, write no rows")
    parser.add_argument("--requests", action="store_true", help="print each request in both worlds")
    asked = parser.parse_args()
    trace = with_bursts_spread(sliced(read_trace(asked.trace), start=asked.start, count=asked.count))
    workload = with_answers(scaled(sped_up(trace, asked.speedup)))
    if asked.simulate_only:
        for policy in asked.policies:
            expected = simulate(workload, policy)
            print(
                policy, mean(e.ttft_s for e in expected), mean(e.tpot_ms for e in expected), workload.duration_us / 1e6
            )
        return
    command = (
        f"simulator_live.py {asked.trace.name} --start {asked.start} --count {asked.count} --speedup {asked.speedup:g}"
    )
    device = f"{cpu_device(len(os.sched_getaffinity(0)))}, steps padded to their modelled time"
    results = ResultFile(RESULTS / "simulator_live.csv", device=device, command=command)
    measured = {}
    for policy in asked.policies:
        begun_s, load_before = time.monotonic(), os.getloadavg()[0]
        live, lateness = replay(workload, policy, SHAPE)
        results.add(policy, "load average", f"{load_before:.1f} to {os.getloadavg()[0]:.1f}", "")
        results.add(policy, "lateness of steps", lateness, "share of engine time")
        print(f"{policy}: {len(live)} requests in {time.monotonic() - begun_s:.0f} s", flush=True)
        measured[policy] = (live, simulate(workload, policy))
        if asked.requests:
            print_requests(workload, *measured[policy])
        compare(results, policy, *measured[policy])
    if len(measured) > 1:
        ranking(results, measured)


if __name__ == "__main__":
    main()
