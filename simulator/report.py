"""What a run says about itself: every figure that a comparison of policies needs, in one flat record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from conductor.core.pricing import Targets
from simulator.block_cache import BlockCache
from simulator.cluster import Cluster
from simulator.series import SIDES, load_over_time, tpot_us
from simulator.tiers import TIERS
from simulator.trace_front import End, Observed
from simulator.workload import Workload

SLOW_GAPS_SHARE = 0.1
"""TBT of a request is the mean of its longest 10 % gaps between tokens (Mooncake's definition)."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT at most `ttft_us`, or `ttft_factor` times the unloaded one where that is more; TPOT at most `tpot_us`."""

    ttft_us: float = 2_000_000.0
    ttft_factor: float = 3.0
    tpot_us: float = 50_000.0

    def targets(self) -> Targets:
        """The same for a policy that weighs latencies."""
        return Targets(ttft_us=self.ttft_us, ttft_factor=self.ttft_factor, tpot_us=self.tpot_us)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, but for TPOT, ITL and TBT in milliseconds. Means and quantiles are over completed requests."""

    policy: str
    workload: str
    notes: tuple[str, ...]
    digest: str
    seed: int
    complete: bool
    """False: the run was ended early and these are figures of a part."""
    offered: int
    accepted: int
    rejected: int
    completed: int
    failed: int
    replanned: int
    offered_per_s: float
    attainment: float
    """Completed within both objectives, of all offered."""
    attainment_accepted: float
    goodput_per_s: float
    """Requests completed within both objectives per second."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_queue_s: float
    """Mean time before prefill starts: in the Conductor and at P."""
    ttft_fetch_s: float
    """Mean time, of the queue's, in which cached tokens were on their way to P from another tier or instance."""
    ttft_prefill_s: float
    transfer_tail_s: float
    """Mean time from the first token to the hand-off's end."""
    tpot_mean_ms: float
    tpot_p99_ms: float
    itl_p99_ms: float
    tbt_mean_ms: float
    hit_rate: float
    """Cached share of prompt tokens."""
    hit_rate_tiers: dict[str, float]
    """The same by where the tokens were when the request came: `gpu`, and the tiers that were read for it."""
    hit_rate_max: float
    """With one pool without a bound."""
    tokens_prefilled: int
    tokens_wasted: int
    """Prefilled beyond what completed requests lacked: failed attempts, recompute after preemption."""
    bytes_moved: float
    preemptions: int
    utilisation_prefill: float
    utilisation_decode: float
    load_correlation: float
    """Of P's and D's utilisation over time, bins of 10 s."""
    virtual_s: float
    events: int


class _Latencies(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_ms: float
    tbt_ms: float
    in_slo: bool


def summarise(cluster: Cluster, policy: str, slo: Slo, *, complete: bool = True) -> RunSummary:
    """Figures of a run that has ended, or been ended."""
    seen = [each for front in cluster.fronts for each in front.observed.values()]
    done = [each for each in seen if each.end is End.COMPLETED]
    gaps_ms: list[np.ndarray] = []
    latencies = [_latencies(each, cluster, slo, gaps_ms) for each in done]
    rejected = sum(each.end is End.REJECTED for each in seen)
    good = sum(each.in_slo for each in latencies)
    span_s = max(cluster.heap.now_us, 1) / 1e6
    prefilled = sum(getattr(worker.engine, "tokens_computed", 0) for worker in cluster.workers)
    lacked = sum(each.tokens_prompt - each.tokens_cached for each in done)
    ttft_s = np.array([each.ttft_s for each in latencies] or [0.0])
    tpot_ms = np.array([each.tpot_ms for each in latencies] or [0.0])
    loads = {side: load_over_time(cluster, side) for side in SIDES}
    return RunSummary(
        policy=policy,
        workload=cluster.workload.name,
        notes=cluster.workload.notes,
        digest=cluster.workload.digest(),
        seed=cluster.spec.seed,
        complete=complete,
        offered=len(seen),
        accepted=len(seen) - rejected,
        rejected=rejected,
        completed=len(done),
        failed=sum(each.end is End.FAILED for each in seen),
        replanned=sum(each.attempt - 1 for each in seen),
        offered_per_s=len(seen) / max(cluster.workload.duration_us / 1e6, 1e-9),
        attainment=good / max(len(seen), 1),
        attainment_accepted=good / max(len(seen) - rejected, 1),
        goodput_per_s=good / span_s,
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=float(np.quantile(ttft_s, 0.5)),
        ttft_p90_s=float(np.quantile(ttft_s, 0.9)),
        ttft_p99_s=float(np.quantile(ttft_s, 0.99)),
        ttft_queue_s=_mean_s([each.prefill_started_us - each.arrival_us for each in done]),
        ttft_fetch_s=sum(worker.fetch_us for worker in cluster.workers) / 1e6 / max(len(done), 1),
        ttft_prefill_s=_mean_s([each.first_token_us - each.prefill_started_us for each in done]),
        transfer_tail_s=_mean_s([max(0, each.handoff_us - each.first_token_us) for each in done if each.handoff_us]),
        tpot_mean_ms=float(tpot_ms.mean()),
        tpot_p99_ms=float(np.quantile(tpot_ms, 0.99)),
        itl_p99_ms=float(np.quantile(np.concatenate(gaps_ms), 0.99)) if gaps_ms else 0.0,
        tbt_mean_ms=float(np.mean([each.tbt_ms for each in latencies] or [0.0])),
        hit_rate=sum(each.tokens_cached for each in done) / max(sum(each.tokens_prompt for each in done), 1),
        hit_rate_tiers=_hit_rate_tiers(cluster, done),
        hit_rate_max=hit_rate_max(cluster.workload),
        tokens_prefilled=prefilled,
        tokens_wasted=max(0, prefilled - lacked),
        bytes_moved=cluster.links.bytes_moved,
        preemptions=sum(worker.core.load().preemptions for worker in cluster.workers),
        utilisation_prefill=float(loads["prefill"].mean()),
        utilisation_decode=float(loads["decode"].mean()),
        load_correlation=_correlation(loads["prefill"], loads["decode"]),
        virtual_s=cluster.heap.now_us / 1e6,
        events=cluster.heap.executed,
    )


def hit_rate_max(workload: Workload) -> float:
    """Share of prompt tokens that one unbounded pool would have, the last token of a prompt never among them."""
    cache = BlockCache("lru", None)
    hit = total = 0
    for request in workload.requests:
        spans = cache.use(request.prefix_ids)
        hit += min(spans * workload.span_tokens, request.tokens_prompt - 1)
        total += request.tokens_prompt
    return hit / max(total, 1)


def _hit_rate_tiers(cluster: Cluster, done: Sequence[Observed]) -> dict[str, float]:
    """What was not brought for a request was on the GPU already."""
    total = max(sum(each.tokens_prompt for each in done), 1)
    brought = {tier: sum(worker.tokens_brought[tier] for worker in cluster.workers) / total for tier in TIERS}
    cached = sum(each.tokens_cached for each in done) / total
    return {"gpu": max(0.0, cached - sum(brought.values())), **brought}


def highest_good_rate(summaries: Sequence[RunSummary], attainment: float = 0.9) -> float:
    """The highest offered rate at which so many of the offered requests met both objectives; 0 when none did."""
    return max((each.offered_per_s for each in summaries if each.attainment >= attainment), default=0.0)


def _latencies(seen: Observed, cluster: Cluster, slo: Slo, gaps_ms: list[np.ndarray]) -> _Latencies:
    times_us = np.frombuffer(seen.times_us, dtype=np.int64)
    ttft_us = seen.first_token_us - seen.arrival_us
    tbt_ms = 0.0
    if len(times_us) > 1:
        gaps = np.diff(times_us) / 1e3
        gaps_ms.append(gaps)
        slow = max(1, int(len(gaps) * SLOW_GAPS_SHARE))
        tbt_ms = float(np.partition(gaps, len(gaps) - slow)[-slow:].mean())
    unloaded_us = cluster.spec.cost.prefill.us(seen.tokens_prompt)
    in_slo = ttft_us <= max(slo.ttft_us, slo.ttft_factor * unloaded_us) and tpot_us(seen) <= slo.tpot_us
    return _Latencies(ttft_us / 1e6, tpot_us(seen) / 1e3, tbt_ms, bool(in_slo))


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if len(left) < 2 or not left.std() or not right.std():
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def _mean_s(times_us: Sequence[int]) -> float:
    return float(np.mean(times_us)) / 1e6 if times_us else 0.0
