"""Claims C3 and C4: mean TTFT of Mooncake's four prefill schedulers, over a curve of loads.

    python benchmarks/simulator_schedulers.py c3 CONVERSATION_TRACE --speedup 0.8 1 1.2 [--count 0] [--plot FILE]
    python benchmarks/simulator_schedulers.py c4 TOOL_AGENT_TRACE --speedup 1

C3 (FAST'25, Fig. 5): LLaMA3-70B on nodes of 8 x A800, conversation trace. The paper does not say how many of its 16
nodes prefill, nor its MFU; 10 nodes, MFU 0.35, local caches of 3M tokens and links of 40 GB/s were *fitted* to its
ratios. C4 (arXiv, Fig. 8): LLaMA2-70B, 8 + 8 nodes, 23k requests; the same MFU, cache and links, nothing else fitted.

TTFT is decided on the prefill side. So answers are cut to one token, and decode instances are never short of room: the
curves are those of the schedulers alone. Our own policy is drawn beside them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from result_rows import RESULTS, ResultFile
from simulator_claim_figures import curves, save

from segue.cost_model import LinkCost
from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.report import RunSummary, Slo, summarise
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up, with_bursts_spread

MFU = 0.35
KV_TOKENS = 3_000_000
LINK = LinkCost(latency_us=50.0, bytes_per_us=40e3)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure: what was run, and the mean TTFT (s) by scheduler."""

    model: str
    prefill: int
    published_s: dict[str, float]
    source: str


SETTINGS = {
    "c3": Setting(
        model="llama3-70b",
        prefill=10,
        published_s={"mooncake": 3.07, "mooncake-local": 3.58, "least-loaded": 5.27, "random": 19.65},
        source="FAST'25, Fig. 5",
    ),
    "c4": Setting(
        model="llama2-70b",
        prefill=8,
        published_s={"mooncake": 6.26, "mooncake-local": 14.36, "least-loaded": 60.41, "random": 92.07},
        source="arXiv 2407.00079, Fig. 8",
    ),
}


def spec(setting: Setting, seed: int) -> ClusterSpec:
    node = Instance(model=setting.model, node="a800", accelerators=8, mfu=MFU)
    return ClusterSpec(
        prefill=setting.prefill,
        decode=16 - setting.prefill,
        cost=node.cost_model(),
        link=LINK,
        kv_tokens=KV_TOKENS,
        block_size=512,
        seed=seed,
    )


def first_tokens_only(workload: Workload) -> Workload:
    requests = [msgspec.structs.replace(request, tokens_output=1) for request in workload.requests]
    return msgspec.structs.replace(workload, requests=requests, notes=(*workload.notes, "first tokens only"))


def run(setting: Setting, policy: str, workload: Workload, seed: int) -> RunSummary:
    cluster = Cluster(spec(setting, seed), workload, policy)
    cluster.run()
    return summarise(cluster, policy, Slo())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=SETTINGS)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speedup", type=float, nargs="+", default=[1.0])
    parser.add_argument("--count", type=int, default=0, help="requests from the start; 0: all")
    parser.add_argument("--spread", action="store_true", help="spread requests that share a time stamp")
    parser.add_argument("--policies", nargs="+", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    setting = SETTINGS[asked.claim]
    trace = sliced(read_trace(asked.trace), count=asked.count or None)
    trace = first_tokens_only(with_bursts_spread(trace) if asked.spread else trace)
    bursts = "spread" if asked.spread else "as recorded"
    command = f"simulator_schedulers.py {asked.claim} {asked.trace.name} --count {asked.count}, bursts {bursts}"
    device = f"simulated {setting.prefill}P + {16 - setting.prefill}D x (8 A800), MFU {MFU:g}"
    results = ResultFile(RESULTS / "simulator_schedulers.csv", device=device, command=command)
    points: dict[str, list[tuple[float, float]]] = {}
    for speedup in asked.speedup:
        workload = sped_up(trace, speedup)
        for policy in asked.policies or [*setting.published_s, "segue"]:
            figures = run(setting, policy, workload, asked.seed)
            shape = f"{policy}, x{speedup:g}, {figures.offered_per_s:.2f}/s"
            results.add(shape, "ttft mean", figures.ttft_mean_s, "s")
            results.add(shape, "hit rate", figures.hit_rate, f"share, at most {figures.hit_rate_max:.3f}")
            results.add(shape, "P busy", figures.utilisation_prefill, "share")
            points.setdefault(policy, []).append((figures.offered_per_s, figures.ttft_mean_s))
    if asked.plot is not None:
        title = f"Mean time to first token, s; dashed: published ({setting.source})"
        figure = curves(title, points, "requests offered per second", published=setting.published_s, log=True)
        save(figure, asked.plot)


if __name__ == "__main__":
    main()
