"""How fast the simulator replays a trace: CPU seconds, events, and the cost of a decision, as one CSV row.

python benchmarks/simulator_speed.py TRACE.jsonl [REQUESTS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.traces import read_trace
from simulator.workload import sliced


def main(trace: Path, count: int | None) -> None:
    workload = sliced(read_trace(trace), count=count)
    instance = Instance(model="llama3-70b", node="h200", accelerators=1, weights="fp8", kv="fp8")
    spec = ClusterSpec(cost=instance.cost_model(), link=instance.network(), kv_tokens=instance.kv_tokens_total())
    cluster = Cluster(spec, workload)
    started_s, wall_s = time.process_time(), time.perf_counter()
    cluster.run()
    cpu_s, wall_s = time.process_time() - started_s, time.perf_counter() - wall_s
    steps_us = sorted(ns / 1e3 for conductor in cluster.conductors() for ns in conductor.step_ns)  # type: ignore[attr-defined]
    print("workload,requests,virtual_s,cpu_s,wall_s,events,placing_step_p50_us,placing_step_p99_us")
    middle, late = steps_us[len(steps_us) // 2], steps_us[int(len(steps_us) * 0.99)]
    print(
        f"{workload.name},{len(workload.requests)},{cluster.heap.now_us / 1e6:.0f},{cpu_s:.1f},{wall_s:.1f},"
        f"{cluster.heap.executed},{middle:.0f},{late:.0f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
