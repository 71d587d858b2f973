"""Claim C1: hit rate of one pool by eviction policy and capacity, as CSV rows.

python benchmarks/simulator_hit_rate.py TRACE.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

from simulator.block_cache import POLICIES, hit_rate
from simulator.traces import read_trace

CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)


def main(trace: Path) -> None:
    workload = read_trace(trace)
    prompts = [request.prefix_ids for request in workload.requests]
    print("workload,digest,policy,capacity_blocks,hit_rate")
    for policy in POLICIES:
        for capacity in CAPACITIES:
            rate = hit_rate(prompts, policy, capacity).rate
            print(f"{workload.name},{workload.digest()},{policy},{capacity or 'inf'},{rate:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
