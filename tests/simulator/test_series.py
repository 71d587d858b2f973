"""Curves of a run: load and queue over time, and the distributions behind its quantiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simulator.cluster import Cluster, ClusterSpec
from simulator.hardware import Instance
from simulator.series import queued_over_time, series_of
from simulator.trace_front import End, Observed
from simulator.traces import read_trace
from simulator.worker import BUSY_BIN_US
from simulator.workload import sliced

TRACE = Path(__file__).parent.parent / "data" / "conversation_60.jsonl"


def waiting(arrival_us: int, started_us: int, end: End = End.COMPLETED) -> Observed:
    seen = Observed(0, arrival_us, 100)
    seen.prefill_started_us, seen.end = started_us, end
    seen.first_token_us = started_us and started_us + 1
    return seen


def test_the_queue_is_a_mean_over_each_bin() -> None:
    quarter, end_us = BUSY_BIN_US // 4, 3 * BUSY_BIN_US - 1
    seen = [waiting(0, 2 * quarter), waiting(3 * quarter, BUSY_BIN_US + quarter), waiting(BUSY_BIN_US, BUSY_BIN_US)]
    assert queued_over_time(seen, end_us) == pytest.approx([0.75, 0.25, 0.0])


def test_a_request_that_never_began_waits_to_the_end_and_a_rejected_one_does_not() -> None:
    seen = [waiting(0, 0, End.RUNNING), waiting(0, 0, End.REJECTED)]
    assert queued_over_time(seen, 2 * BUSY_BIN_US) == pytest.approx([1.0, 1.0, 0.0])


def test_engines_are_never_busier_than_always_and_curves_rise() -> None:
    instance = Instance(model="llama3-70b", node="h200", accelerators=1, weights="fp8", kv="fp8")
    spec = ClusterSpec(prefill=1, decode=1, cost=instance.cost_model(), link=instance.network(), kv_tokens=400_000)
    cluster = Cluster(spec, sliced(read_trace(TRACE), count=20))
    cluster.run()
    series = series_of(cluster)
    assert 0.5 < max(series.load_prefill) <= 1.0 and 0.9 < max(series.load_decode) <= 1.0
    assert np.all(np.diff(series.ttft_s) >= 0) and len(series.tpot_ms) == 201
    assert sum(series.queued) * series.bin_s == pytest.approx(
        sum((each.prefill_started_us - each.arrival_us) / 1e6 for each in cluster.fronts[0].observed.values()), rel=1e-3
    )
