"""Claims that need no trace: C2, C7 and two sanity checks of the cost model and of the planner.

python benchmarks/simulator_arithmetic.py

C2: bandwidth from which on fetching a prefix beats computing it. C7: nodes of DeepSeek-V3's day. Then: what 80 % cached
tokens save of a 128k prompt, and continuous against static batching of the same requests on one instance.
"""

from __future__ import annotations

import random

from result_rows import RESULTS, ResultFile

from segue.cost_model import CostModel
from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance, fetch_break_even_bytes_s
from simulator.workload import Workload, WorkloadRequest

BREAK_EVEN_TOKENS = 8_192
BREAK_EVEN_FLOPS = {"8 x A800": (8 * 312e12, 6.0), "8 x H800": (8 * 989e12, 19.0)}
"""Peak, and the published GB/s."""

DAY_S = 86_400
DAY_IN, DAY_OUT, NODE_IN_S, NODE_OUT_S, NODES_PUBLISHED = 608e9, 168e9, 73.7e3, 14.8e3, 226.75

LONG_PROMPT, LONG_CACHED = 128 * 1024, 0.8

BATCH = 32
BATCHES = 8
PROMPT_TOKENS = 512
OUTPUT_LONGEST = 512


def nodes_of_a_day() -> float:
    """Prefill and decode nodes that carry DeepSeek-V3's tokens of a day at the published rates of a node."""
    return DAY_IN / DAY_S / NODE_IN_S + DAY_OUT / DAY_S / NODE_OUT_S


def prefill_saved(cost: CostModel, tokens: int, cached_share: float) -> float:
    """Share of the prefill time of a prompt that its cached tokens save."""
    cached = round(tokens * cached_share)
    return 1.0 - cost.prefill.us(tokens - cached, cached) / cost.prefill.us(tokens)


def requests_of_a_burst(seed: int) -> list[WorkloadRequest]:
    """Answers of 1 to OUTPUT_LONGEST tokens, all waiting at time 0."""
    draw = random.Random(seed)
    return [WorkloadRequest(0, PROMPT_TOKENS, draw.randint(1, OUTPUT_LONGEST)) for _ in range(BATCH * BATCHES)]


def makespan_s(requests: list[WorkloadRequest], instance: Instance) -> float:
    """Until the last of them has ended, on one aggregated instance that runs BATCH at a time."""
    spec = ClusterSpec(
        prefill=0,
        decode=0,
        aggregated=1,
        cost=instance.cost_model(),
        link=instance.network(),
        kv_tokens=instance.kv_tokens_total(),
        block_size=64,
        max_num_seqs=BATCH,
        tokens_output_max=OUTPUT_LONGEST,
    )
    cluster = Cluster(spec, Workload(name="burst", requests=requests), "round-robin")
    cluster.run()
    return max(front.observed[index].times_us[-1] for front in cluster.fronts for index in front.observed) / 1e6


def continuous_over_static(seed: int, instance: Instance) -> float:
    """How much longer it takes when a batch starts only after the one before it has ended as a whole."""
    requests = requests_of_a_burst(seed)
    groups = [requests[begin : begin + BATCH] for begin in range(0, len(requests), BATCH)]
    return sum(makespan_s(group, instance) for group in groups) / makespan_s(requests, instance)


def main() -> None:
    results = ResultFile(RESULTS / "simulator_arithmetic.csv", device="cost models", command="simulator_arithmetic.py")
    for node, (flops_s, published) in BREAK_EVEN_FLOPS.items():
        shape = f"C2, LLaMA3-70B, {BREAK_EVEN_TOKENS} tokens, {node}"
        results.add(
            shape, "break-even", fetch_break_even_bytes_s("llama3-70b", BREAK_EVEN_TOKENS, flops_s) / 1e9, "GB/s"
        )
        results.add(shape, "published", published, "GB/s")
    results.add("C7, DeepSeek-V3, H800 nodes", "nodes", nodes_of_a_day(), "")
    results.add("C7, DeepSeek-V3, H800 nodes", "published", NODES_PUBLISHED, "")
    for model in ("llama3.1-8b", "llama3-70b"):
        cost = Instance(model=model, node="h200", accelerators=1, weights="fp8").cost_model()
        results.add(
            f"128k prompt, 80 % cached, {model}", "saved", prefill_saved(cost, LONG_PROMPT, LONG_CACHED), "share"
        )
    instance = Instance(model="llama3.1-8b", node="h200", accelerators=1)
    for seed in range(1, 4):
        shape = f"{BATCH * BATCHES} answers of 1 to {OUTPUT_LONGEST} tokens, batch {BATCH}, seed {seed}"
        results.add(shape, "static over continuous", continuous_over_static(seed, instance), "ratio of makespans")


if __name__ == "__main__":
    main()
