"""Which split of a number of accelerators into prefill and decode instances serves a workload best, by simulation.

Every size of instance (accelerators for one copy of the model, the same for both roles: K/V is handed over as it lies)
has a row of splits, from most decode to most prefill. The search starts at the split whose sides the cost model finds
equally loaded, and goes to the better neighbour until both are worse; beside it one aggregated cluster is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from segue.manifest import Role
from simulator.cluster import Cluster, ClusterSpec
from simulator.cost_engine import CostEngine
from simulator.hardware import Instance, find_node
from simulator.report import RunSummary, Slo, summarise
from simulator.series import load_over_time
from simulator.worker import Worker
from simulator.workload import Workload

BATCH_ASSUMED = 32
"""Decode batch that the first guess reckons with; only the start of the search depends on it."""

BUSY = 0.9
"""Prefill instances busier than this while requests arrive are what a split runs out of."""

BLOCK_TOKENS_MIN = 16


class Split(msgspec.Struct, frozen=True):
    accelerators: int
    """Of one instance."""
    prefill: int
    decode: int
    aggregated: int = 0

    @property
    def label(self) -> str:
        shape = f"{self.aggregated} aggregated" if self.aggregated else f"{self.prefill} P + {self.decode} D"
        return f"{shape}, TP {self.accelerators}"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    split: Split
    summary: RunSummary
    busy_prefill: float
    """Share of engine time while requests arrived; the summary's covers the time after the last one too."""
    busy_decode: float
    prefilled_at_decode: float
    """Share of the computed prompt tokens: a policy may let decode instances prefill, which stretches their steps."""
    reason: str
    """What keeps it from serving more."""

    def order(self, slo: Slo) -> tuple[float, float]:
        """More is better: the share of requests in the objectives; where that is equal, how far the slow tenth of
        first tokens and the slow hundredth of output times stay below theirs."""
        one = self.summary
        if not one.completed:
            return (0.0, -math.inf)
        worst = max(one.ttft_p90_s * 1e6 / slo.ttft_us, one.tpot_p99_ms * 1e3 / slo.tpot_us)
        return (round(one.attainment, 3), -worst)


def instance_sizes(instance: Instance, gpus: int, tokens_longest: int) -> tuple[list[Instance], dict[int, str]]:
    """Instances of 1, 2, 4, ... accelerators that `gpus` divide into, and why the others are left out.

    Raises ValueError when there is none.
    """
    if gpus < 1:
        raise ValueError(f"a plan needs at least one accelerator, got {gpus}")
    sizes: list[Instance] = []
    left_out: dict[int, str] = {}
    size = 1
    while size <= min(gpus, find_node(instance.node).accelerators):
        sized = msgspec.structs.replace(instance, accelerators=size)
        sized.cost_model()  # an unknown type of weights is no reason to try a larger instance
        try:
            room = sized.kv_tokens_total()
        except ValueError as error:
            left_out[size] = str(error)
        else:
            if gpus % size:
                left_out[size] = f"{gpus} accelerators are not a multiple of {size}"
            elif room < tokens_longest:
                left_out[size] = f"the longest request has {tokens_longest:,} tokens, there is room for {room:,}"
            else:
                sizes.append(sized)
        size *= 2
    if not sizes:
        raise ValueError("; ".join(f"TP {size}: {reason}" for size, reason in left_out.items()))
    return sizes, left_out


def search(
    workload: Workload, sizes: Sequence[Instance], gpus: int, slo: Slo, policy: str, note: Callable[[Trial], None]
) -> None:
    """Simulate splits of all sizes; each is told to `note` when it is known."""
    for instance in sizes:
        count = gpus // instance.accelerators

        def run(split: Split, instance: Instance = instance) -> Trial:
            trial = simulate_split(workload, instance, split, slo, policy)
            note(trial)
            return trial

        run(Split(instance.accelerators, 0, 0, count))
        if count > 1:
            _climb(instance, count, workload, run, slo)


def _climb(
    instance: Instance, count: int, workload: Workload, run: Callable[[Split], Trial], slo: Slo
) -> dict[int, Trial]:
    """Trials by number of prefill instances, up the hill from the first guess."""
    known: dict[int, Trial] = {}

    def order(prefill: int) -> tuple[float, float]:
        if prefill not in known:
            known[prefill] = run(Split(instance.accelerators, prefill, count - prefill))
        return known[prefill].order(slo)

    here = first_guess(instance, count, workload)
    while True:
        neighbours = [prefill for prefill in (here - 1, here + 1) if 0 < prefill < count]
        better = max(neighbours, key=order, default=here)
        if order(better) <= order(here):
            return known
        here = better


def first_guess(instance: Instance, count: int, workload: Workload) -> int:
    """Prefill instances, so that both sides have as much to do for each instance."""
    cost = instance.cost_model()
    prefill_us = decode_us = 0.0
    for request in workload.requests:
        prefill_us += cost.prefill.us(request.tokens_prompt)
        step_us = cost.decode.us(BATCH_ASSUMED, BATCH_ASSUMED * (request.tokens_prompt + request.tokens_output / 2))
        decode_us += step_us / BATCH_ASSUMED * request.tokens_output
    return min(max(1, round(count * prefill_us / (prefill_us + decode_us))), count - 1)


def simulate_split(workload: Workload, instance: Instance, split: Split, slo: Slo, policy: str) -> Trial:
    cluster = Cluster(split_spec(workload, instance, split, slo), workload, policy)
    cluster.run()
    summary = summarise(cluster, policy, slo)
    busy_prefill, busy_decode = (_busy(cluster, side) for side in ("prefill", "decode"))
    at_decode = _prefilled_at_decode(cluster)
    reason = bottleneck(summary, slo, split, busy_prefill, busy_decode, at_decode)
    return Trial(
        split=split,
        summary=summary,
        busy_prefill=busy_prefill,
        busy_decode=busy_decode,
        prefilled_at_decode=at_decode,
        reason=reason,
    )


def split_spec(workload: Workload, instance: Instance, split: Split, slo: Slo) -> ClusterSpec:
    return ClusterSpec(
        prefill=split.prefill,
        decode=split.decode,
        aggregated=split.aggregated,
        cost=instance.cost_model(),
        link=instance.network(),
        kv_tokens=instance.kv_tokens_total(),
        targets=slo.targets(),
        block_size=max(BLOCK_TOKENS_MIN, workload.span_tokens),
    )


def _busy(cluster: Cluster, side: str) -> float:
    bins = load_over_time(cluster, side)
    arriving = max(1, round(len(bins) * cluster.workload.duration_us / max(cluster.heap.now_us, 1)))
    return float(np.mean(bins[:arriving]))


def _prefilled_at_decode(cluster: Cluster) -> float:
    decodes = [worker for worker in cluster.workers if worker.manifest.role is Role.DECODE]
    total = max(sum(_tokens_computed(worker) for worker in cluster.workers), 1)
    return sum(map(_tokens_computed, decodes)) / total


def _tokens_computed(worker: Worker) -> int:
    assert isinstance(worker.engine, CostEngine)
    return worker.engine.tokens_computed


def bottleneck(
    summary: RunSummary, slo: Slo, split: Split, busy_prefill: float, busy_decode: float, at_decode: float
) -> str:
    """What a client sees, and what saturates first. A decode engine is busy with one sequence as with a hundred: it is
    full when its steps take longer than the objective, or when requests wait although prefill instances do not work."""
    if not summary.completed:
        return f"no request was completed, {summary.rejected:,} were rejected"
    ttft_late = summary.ttft_p90_s * 1e6 > slo.ttft_us
    tpot_late = summary.tpot_p99_ms * 1e3 > slo.tpot_us
    seen = _seen(summary, slo, ttft_late, tpot_late)
    if split.aggregated:
        return f"{seen}; prefill and decode share instances that are {busy_decode:.0%} busy"
    busy = f"P {busy_prefill:.0%} and D {busy_decode:.0%} busy"
    waits = ttft_late and busy_prefill < BUSY and summary.ttft_queue_s > summary.ttft_prefill_s
    why = []
    if busy_prefill >= BUSY:
        why.append("prefill saturates")
    if tpot_late:
        why.append(f"decode saturates: its steps are too long, {at_decode:.0%} of prompt tokens are computed there")
    if waits:
        why.append("decode saturates: no room for more K/V")
    if summary.preemptions:
        why.append(f"{summary.preemptions:,} preemptions for K/V memory")
    if not why:
        why.append("the prefill of one request takes so long" if ttft_late else "room to spare")
    return f"{seen}; {', '.join(why)} ({busy})"


def _seen(summary: RunSummary, slo: Slo, ttft_late: bool, tpot_late: bool) -> str:
    late = [f"p90 TTFT {summary.ttft_p90_s:.2f} s of {slo.ttft_us / 1e6:g}"] if ttft_late else []
    late += [f"p99 TPOT {summary.tpot_p99_ms:.1f} ms of {slo.tpot_us / 1e3:g}"] if tpot_late else []
    return ", ".join(late) or "both objectives kept"


def ranked(trials: Sequence[Trial], slo: Slo) -> list[Trial]:
    """Best first; of equals the one that was tried first."""
    return sorted(trials, key=lambda trial: trial.order(slo), reverse=True)
