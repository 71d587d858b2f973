"""Disaggregated against colocated serving on the same nodes: Mooncake's "up to 525 %", against our own baselines.

    python benchmarks/simulator_colocated.py [--tokens 16384 32768 65536 131072] [--requests 120]

The paper (arXiv 2407.00079, section 8) compares [3P+1D] and [2P+2D] with four nodes of vLLM as it was then: prompts of
16k to 128k tokens, half of each cached, answers of 512, and the highest rate at which the P90 of TTFT stays within ten
times, and that of TBT within five times, what a single request sees. vLLM is not what stands against us here, but our
own aggregated instances: `whole prompts` computes a prompt in one step, as systems did then, and lets every running
answer wait for it; `chunks of 2,048` is chunked prefill with a usual budget; X
budget whose steps keep the bound of TBT here, so what a careful operator would choose. Disaggregated instances are
routed by Mooncake's rule, and by ours, which may compute a prompt on a decode instance when it knows no such bound.
"""

from __future__ import annotations

import argparse
import random

import msgspec
import numpy as np
from result_rows import RESULTS, ResultFile
from simulator_schedulers import KV_TOKENS, LINK, MFU

from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.report import SLOW_GAPS_SHARE
from simulator.workload import Workload, WorkloadRequest

TOKENS_OUT = 512
CACHED_SHARE = 0.5
TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0
SPAN = 512
STEPS = 6


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    chunk: int
    policy: str = "segue"


SERVINGS = (
    Serving(name="3P + 1D", prefill=3, decode=1, chunk=8_192, policy="mooncake"),
    Serving(name="2P + 2D", prefill=2, decode=2, chunk=8_192, policy="mooncake"),
    Serving(name="3P + 1D, segue", prefill=3, decode=1, chunk=8_192),
    Serving(name="2P + 2D, segue", prefill=2, decode=2, chunk=8_192),
    Serving(name="4 colocated, whole prompts", aggregated=4, chunk=1 << 18),
    Serving(name="4 colocated, chunks of 2,048", aggregated=4, chunk=2_048),
    Serving(name="4 colocated, chunks of 256", aggregated=4, chunk=256),
)


def requests_of(tokens: int, count: int, rate: float, seed: int) -> Workload:
    """Poisson arrivals; the first half of every prompt is the same. One request comes first, alone: it fills caches."""
    draw, at_s = random.Random(seed), 0.0
    shared = tuple(range(int(tokens * CACHED_SHARE) // SPAN))
    requests = []
    for number in range(count):
        own = tuple(1_000 + number * 1_000 + place for place in range(tokens // SPAN - len(shared)))
        requests.append(WorkloadRequest(round(at_s * 1e6), tokens, TOKENS_OUT, (*shared, *own)))
        at_s += draw.expovariate(rate) if number else 300.0
    return Workload(name=f"{tokens} tokens", requests=requests, span_tokens=SPAN)


def latencies(serving: Serving, workload: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(TTFT in s, TBT in ms) of every request but the first."""
    node = Instance(model="llama2-70b", node="a800", accelerators=8, mfu=MFU)
    spec = ClusterSpec(
        prefill=serving.prefill,
        decode=serving.decode,
        aggregated=serving.aggregated,
        cost=node.cost_model(),
        link=LINK,
        kv_tokens=KV_TOKENS,
        block_size=SPAN,
        max_num_batched_tokens=serving.chunk,
        tokens_output_max=TOKENS_OUT,
        seed=seed,
    )
    cluster = Cluster(spec, workload, serving.policy)
    cluster.run()
    seen = [cluster.fronts[0].observed[index] for index in range(1, len(workload.requests))]
    ttft_s = np.array([each.first_token_us - each.arrival_us for each in seen]) / 1e6
    slow = max(1, int((TOKENS_OUT - 1) * SLOW_GAPS_SHARE))
    gaps = [np.sort(np.diff(np.frombuffer(each.times_us, dtype=np.int64))) for each in seen]
    return ttft_s, np.array([each[-slow:].mean() for each in gaps]) / 1e3


def highest_rate(serving: Serving, tokens: int, count: int, bounds: tuple[float, float], seed: int) -> float:
    """By bisection of the rate's logarithm; 0 when even the lowest one breaks a bound (TTFT in s, TBT in ms)."""
    node = Instance(model="llama2-70b", node="a800", accelerators=8, mfu=MFU)
    half = int(tokens * CACHED_SHARE)
    capacity = 4e6 / node.cost_model().prefill.us(tokens - half, half)
    low, high, best = capacity / 40, capacity * 1.3, 0.0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        ttft_s, tbt_ms = latencies(serving, requests_of(tokens, count, middle, seed), seed)
        if np.quantile(ttft_s, 0.9) <= bounds[0] and np.quantile(tbt_ms, 0.9) <= bounds[1]:
            low = best = middle
        else:
            high = middle
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 32_768, 65_536, 131_072])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--servings", nargs="+", default=[serving.name for serving in SERVINGS])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    command = f"simulator_colocated.py --requests {asked.requests} --seed {asked.seed}"
    results = ResultFile(RESULTS / "simulator_colocated.csv", device="simulated 4 x (8 A800)", command=command)
    for tokens in asked.tokens:
        alone_ttft_s, alone_tbt_ms = latencies(SERVINGS[0], requests_of(tokens, 2, 1.0, asked.seed), asked.seed)
        bounds = (TTFT_FACTOR * float(alone_ttft_s[0]), TBT_FACTOR * float(alone_tbt_ms[0]))
        for serving in SERVINGS:
            if serving.name in asked.servings:
                rate = highest_rate(serving, tokens, asked.requests, bounds, asked.seed)
                results.add(f"{tokens} + {TOKENS_OUT} tokens, {serving.name}", "highest rate", rate, "requests/s")


if __name__ == "__main__":
    main()
