"""Overload: a square wave between half and twice the capacity, under our admission and under Mooncake's three.

python benchmarks/simulator_overload.py [--periods 4] [--noise 0.1] [POLICY ...]

Rejections, wasted prefill, attainment of what was accepted, and whether P and D swing: once a second the queue at P (in
seconds of its work) and the step time of D's batches (by the cost model) are noted; in the loaded half of each period,
after a third of it to settle, their standard deviations and their correlation are taken. Anti-phase shows as a negative
correlation with large deviations.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from result_rows import RESULTS, ResultFile

from conductor.core.admission import Objectives
from conductor.core.pricing import Targets
from simulator.cluster import Cluster, ClusterSpec
from simulator.generators import Lengths
from simulator.hardware import Instance
from simulator.load_sampler import LoadSampler
from simulator.report import Slo, summarise
from simulator.workload import Workload, WorkloadRequest

POLICIES = ("segue", "mooncake-baseline", "mooncake-early", "mooncake-predicted")
HALF_PERIOD_S = 120
PROMPT = Lengths(median=8_000, sigma=0.4, longest=60_000)
OUTPUT = Lengths(median=250, sigma=0.4, longest=3_000)
SLO = Slo(ttft_us=30e6, ttft_factor=3.0, tpot_us=36e3)
PREFILL, DECODE = 12, 2


def square_wave(low: float, high: float, periods: int, seed: int) -> Workload:
    """Poisson arrivals, `low` a second in the first half of each period and `high` in the other."""
    source, requests, at_s = random.Random(seed), [], 0.0
    while at_s < 2 * HALF_PERIOD_S * periods:
        at_s += source.expovariate(high if int(at_s / HALF_PERIOD_S) % 2 else low)
        requests.append(WorkloadRequest(round(at_s * 1e6), PROMPT.draw(source), OUTPUT.draw(source)))
    return Workload(name=f"square wave {low:g}/{high:g}", requests=requests)


def spec(policy: str, noise: float, seed: int) -> ClusterSpec:
    h200 = Instance(model="llama3-70b", node="h200", accelerators=1, weights="fp8", kv="fp8")
    ours = Objectives(ttft_us=SLO.ttft_us, ttft_factor=SLO.ttft_factor, tpot_us=SLO.tpot_us)
    return ClusterSpec(
        prefill=PREFILL,
        decode=DECODE,
        cost=h200.cost_model(),
        link=h200.network(),
        kv_tokens=h200.kv_tokens_total(),
        block_size=64,
        noise=noise,
        seed=seed,
        targets=Targets(ttft_us=SLO.ttft_us, ttft_factor=SLO.ttft_factor, tpot_us=SLO.tpot_us),
        objectives=ours if policy == "segue" else None,
        refuse_ttft_us=SLO.ttft_us,
        refuse_tpot_us=SLO.tpot_us,
        uniform_decode_us=10e6,
    )


def settled(until_s: float) -> Callable[[float], bool]:
    """Times in the loaded half of a period, after a third of it."""
    return lambda at_s: at_s < until_s and at_s % (2 * HALF_PERIOD_S) > HALF_PERIOD_S * (1 + 1 / 3)


def run(policy: str, workload: Workload, noise: float, seed: int, results: ResultFile) -> None:
    cluster = Cluster(spec(policy, noise, seed), workload, policy)
    sampler = LoadSampler(cluster)
    cluster.run()
    figures = summarise(cluster, policy, SLO)
    swing = sampler.swing(settled(workload.duration_us / 1e6))
    shape = f"{policy}, {workload.name}, noise {noise:g}"
    results.add(shape, "offered", str(figures.offered), "")
    results.add(shape, "rejected", figures.rejected / figures.offered, "share")
    results.add(shape, "attainment of accepted", figures.attainment_accepted, "share")
    results.add(shape, "attainment of offered", figures.attainment, "share")
    results.add(shape, "goodput", figures.goodput_per_s, "requests/s")
    results.add(shape, "wasted prefill", figures.tokens_wasted / max(figures.tokens_prefilled, 1), "share")
    results.add(shape, "TTFT p99", figures.ttft_p99_s, "s")
    results.add(shape, "TPOT p99", figures.tpot_p99_ms, "ms")
    results.add(shape, "deviation of P's queue", swing.waiting_s, "s")
    results.add(shape, "deviation of D's step", swing.step_ms, "ms")
    results.add(shape, "correlation of P and D", swing.correlation, "")
    for coverage in next(iter(cluster.conductors())).core.forecast.coverages():  # type: ignore[attr-defined]
        if policy == "segue" and coverage.coverage is not None:
            results.add(shape, f"p90 coverage of {coverage.kind}", coverage.coverage, "share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--low", type=float, default=2.5, help="requests a second, half of the capacity")
    parser.add_argument("--high", type=float, default=10.0, help="twice the capacity")
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    device = f"simulated {PREFILL}P + {DECODE}D x H200"
    command = f"simulator_overload.py --periods {asked.periods} --seed {asked.seed}"
    results = ResultFile(RESULTS / "simulator_overload.csv", device=device, command=command)
    workload = square_wave(asked.low, asked.high, asked.periods, asked.seed)
    for policy in asked.policies:
        run(policy, workload, asked.noise, asked.seed, results)


if __name__ == "__main__":
    main()
