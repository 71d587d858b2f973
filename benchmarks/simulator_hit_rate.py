"""Claim C1: hit rate of one pool of blocks by eviction policy and capacity, beside the published ones.

python benchmarks/simulator_hit_rate.py TOOL_AGENT_TRACE.jsonl [POLICY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from result_rows import RESULTS, ResultFile

from simulator.block_cache import hit_rate
from simulator.traces import read_trace

CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)
PUBLISHED = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length-aware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
"""Mooncake (arXiv 2407.00079), Table 1, by capacity."""


def main(trace: Path, policies: list[str]) -> None:
    workload = read_trace(trace)
    prompts = [request.prefix_ids for request in workload.requests]
    results = ResultFile(
        RESULTS / "simulator_hit_rate.csv",
        device=f"one pool, trace digest {workload.digest()}",
        command=f"simulator_hit_rate.py {trace.name}",
    )
    for policy in policies or PUBLISHED:
        published, worst = PUBLISHED[policy], 0.0
        for capacity, expected in zip(CAPACITIES, published, strict=True):
            rate = hit_rate(prompts, policy, capacity).rate
            worst = max(worst, abs(rate - expected))
            results.add(f"{policy}, {capacity or 'unbounded'} blocks", "hit rate", rate, f"share; published {expected}")
        results.add(policy, "largest difference", worst, "share")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
