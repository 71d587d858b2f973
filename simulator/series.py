"""What a run looks like over time and over its requests: the curves behind the figures of a report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from segue.manifest import Role
from simulator.cluster import Cluster
from simulator.trace_front import End, Observed
from simulator.worker import BUSY_BIN_US

CURVE_POINTS = 201
"""Quantiles kept of a distribution: half a percent apart."""

SIDES = {"prefill": (Role.PREFILL,), "decode": (Role.DECODE, Role.AGGREGATED)}


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles are evenly spaced from 0 to 1; bins are `bin_s` long and start at time 0."""

    ttft_s: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    bin_s: float
    load_prefill: tuple[float, ...]
    """Share of the instances' engine time that was busy in each bin."""
    load_decode: tuple[float, ...]
    queued: tuple[float, ...]
    """Mean number of requests whose prefill has not begun; rejected ones are not among them."""


def series_of(cluster: Cluster) -> RunSeries:
    seen = [each for front in cluster.fronts for each in front.observed.values()]
    done = [each for each in seen if each.end is End.COMPLETED]
    return RunSeries(
        ttft_s=_curve([(each.first_token_us - each.arrival_us) / 1e6 for each in done]),
        tpot_ms=_curve([tpot_us(each) / 1e3 for each in done]),
        bin_s=BUSY_BIN_US / 1e6,
        load_prefill=_rounded(load_over_time(cluster, "prefill")),
        load_decode=_rounded(load_over_time(cluster, "decode")),
        queued=_rounded(queued_over_time(seen, cluster.heap.now_us)),
    )


def tpot_us(seen: Observed) -> float:
    """Mean time of a token after the first one; 0 for an answer of one token."""
    return (seen.times_us[-1] - seen.times_us[0]) / max(len(seen.times_us) - 1, 1)


def load_over_time(cluster: Cluster, side: str) -> np.ndarray:
    """Share of engine time that was busy, by bin; mean over the instances of one of SIDES."""
    workers = [worker for worker in cluster.workers if worker.manifest.role in SIDES[side]]
    busy = np.zeros(cluster.heap.now_us // BUSY_BIN_US + 1)
    for worker in workers:
        for number, busy_us in worker.busy_us.items():
            busy[number] += busy_us
    return busy / (max(len(workers), 1) * BUSY_BIN_US)


def queued_over_time(seen: Sequence[Observed], end_us: int) -> np.ndarray:
    """Requests that wait for their prefill to begin, mean of each bin. One that never began waits until `end_us`."""
    waits = [
        (each.arrival_us, each.prefill_started_us if each.first_token_us else end_us)
        for each in seen
        if each.first_token_us or each.end is End.RUNNING
    ]
    edges_us = np.arange(end_us // BUSY_BIN_US + 2) * BUSY_BIN_US
    if not waits:
        return np.zeros(len(edges_us) - 1)
    begins, ends = (np.sort(np.array(side, dtype=np.int64)) for side in zip(*waits, strict=True))
    waited_us = _area_us(begins, edges_us) - _area_us(ends, edges_us)
    mean: np.ndarray = np.diff(waited_us) / BUSY_BIN_US
    return mean


def _area_us(sorted_us: np.ndarray, edges_us: np.ndarray) -> np.ndarray:
    """Integral up to each edge of how many of the instants have passed."""
    passed = np.searchsorted(sorted_us, edges_us, side="right")
    sums = np.concatenate([[0], np.cumsum(sorted_us)])
    area: np.ndarray = passed * edges_us - sums[passed]
    return area


def _curve(values: Sequence[float]) -> tuple[float, ...]:
    return _rounded(np.quantile(values, np.linspace(0, 1, CURVE_POINTS))) if values else ()


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    rounded: list[float] = np.round(values, 4).tolist()
    return tuple(rounded)
