"""Metrics of the Conductor's predictions: how often their 90 % bounds hold, whether they drifted, and by how much they
were off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from conductor.core.decision_log import REGRET_EDGES_US
from conductor.ports import PredictionView


def prediction_metrics(predictions: Sequence[PredictionView]) -> Iterator[Metric]:
    labels = ["model_name", "kind"]
    coverage = GaugeMetricFamily(
        "segue:prediction_coverage", "Share of recent latencies under their predicted 90 % bound.", labels=labels
    )
    drifted = GaugeMetricFamily(
        "segue:prediction_drifted", "1 where that share left 85 to 95 %: admission is careful.", labels=labels
    )
    regret = HistogramMetricFamily(
        "segue:prediction_regret_seconds", "Actual less predicted latency of placed requests.", labels=labels
    )
    for view in predictions:
        who = [view.coverage.model, view.coverage.kind]
        if view.coverage.coverage is not None:
            coverage.add_metric(who, view.coverage.coverage)
        drifted.add_metric(who, float(bool(view.coverage.drift)))
        if any(view.regrets.counts):
            regret.add_metric(who, _buckets(view.regrets.counts), view.regrets.sum_us / 1e6)
    yield from (coverage, drifted, regret)


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    edges = [*(str(edge / 1e6) for edge in REGRET_EDGES_US), "+Inf"]
    total, buckets = 0, []
    for edge, count in zip(edges, counts, strict=True):
        total += count
        buckets.append((edge, float(total)))
    return buckets
