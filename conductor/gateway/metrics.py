"""Prometheus metrics of one gateway, named as vLLM names its own, under `segue:`.

Rates over tokens are pairs of counters (`prefix_cache_hits` over `prefix_cache_queries`), never means of ratios. A
request counts once, whatever its attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.gateway.prediction_metrics import prediction_metrics
from conductor.gateway.session_events import End, SessionSpec, Summary
from conductor.gateway.token_metrics import TokenMetrics
from conductor.ports import ClusterView
from segue.errors import Overloaded, RequestError

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)

BOOKED_KINDS = ("requests", "pages", "tokens")
PAGE_STATES = ("free", "active", "cached", "held", "quarantined")


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = TokenMetrics(ITL_BUCKETS)
        registry.register(self.tokens)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"segue:{name}", text, ["model_name"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"segue:{name}", text, labels, registry=registry)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.tpot = histogram("time_per_output_token_seconds", "Mean over a request after its first.", ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to the end.", E2E_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "Waiting at the prefill instance.", E2E_BUCKETS)
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.output_size = histogram("request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with a first token.", "model_name")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in prefix caches.", "model_name")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens whose K/V was reused.", "model_name")
        self.success = counter("request_success", "Ended well, by reason.", "model_name", "finished_reason")
        self.aborted = counter("request_aborted", "Ended by a cancel or a client that left.", "model_name")
        self.errors = counter(
            "request_errors", "Calls answered with an error; 429s name a resource.", "code", "resource"
        )
        self.replans = counter("request_replans", "Attempts after the first.", "model_name")

    def request_ended(self, spec: SessionSpec, summary: Summary, end: End) -> None:
        model = spec.model
        if end.error is None:
            self.success.labels(model, end.reason).inc()
        elif end.reason == "cancelled":
            self.aborted.labels(model).inc()
        if not summary.first_token_us:
            return
        self.prompt_tokens.labels(model).inc(summary.tokens_prompt)
        self.cache_queries.labels(model).inc(summary.tokens_prompt)
        self.cache_hits.labels(model).inc(summary.tokens_cached)
        self.ttft.labels(model).observe(summary.first_token_us / 1e6)
        self.queue.labels(model).observe(summary.queue_us / 1e6)
        self.e2e.labels(model).observe(summary.finished_us / 1e6)
        self.prompt_size.labels(model).observe(summary.tokens_prompt)
        self.output_size.labels(model).observe(summary.tokens_generated)
        if summary.tokens_generated > 1:
            decode_us = summary.finished_us - summary.first_token_us
            self.tpot.labels(model).observe(decode_us / 1e6 / (summary.tokens_generated - 1))

    def replanned(self, model: str) -> None:
        self.replans.labels(model).inc()

    def answered_with(self, error: Exception) -> None:
        """Counted where an error is turned into an answer, so each call at most once."""
        code = error.code if isinstance(error, RequestError) else "internal_error"
        self.errors.labels(code, error.resource if isinstance(error, Overloaded) else "").inc()


class ClusterCollector(Collector):
    """Gauges read at scrape time: requests of this gateway, and load and pages of every instance."""

    def __init__(self, cluster: Callable[[], ClusterView], counts: Callable[[], tuple[int, int]]) -> None:
        self._cluster = cluster
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._counts()
        view = self._cluster()
        yield GaugeMetricFamily("segue:num_requests_running", "Live requests whose tokens arrive.", value=running)
        yield GaugeMetricFamily("segue:num_requests_waiting", "Live requests before their first token.", value=waiting)
        yield GaugeMetricFamily("segue:num_requests_queued", "Waiting in the Conductor.", value=view.requests_queued)
        yield from _instance_gauges(view)
        yield from prediction_metrics(view.predictions)


def _pool_sizes(view: ClusterView) -> Metric:
    """Both states of every pool that has an instance, also 0."""
    sizes = GaugeMetricFamily("segue:instances", "Registered instances by pool and state.", labels=["pool", "state"])
    pools = [(instance.manifest.role.value, instance.draining) for instance in view.instances]
    for pool in sorted({pool for pool, _ in pools}):
        sizes.add_metric([pool, "ready"], pools.count((pool, False)))
        sizes.add_metric([pool, "draining"], pools.count((pool, True)))
    return sizes


def _instance_gauges(view: ClusterView) -> Iterator[Metric]:
    yield _pool_sizes(view)
    labels = ["instance", "role"]
    pages = GaugeMetricFamily("segue:kv_pages", "KV pages of an instance by state.", labels=[*labels, "state"])
    booked = GaugeMetricFamily("segue:instance_booked", "Booked by live attempts.", labels=[*labels, "kind"])
    running = GaugeMetricFamily("segue:instance_requests_running", "Sequences in the batch.", labels=labels)
    waiting = GaugeMetricFamily("segue:instance_requests_waiting", "Accepted, not running.", labels=labels)
    queued = GaugeMetricFamily("segue:instance_tokens_queued", "Prompt tokens not computed yet.", labels=labels)
    preemptions = GaugeMetricFamily("segue:instance_preemptions", "Preemptions since start.", labels=labels)
    for instance in view.instances:
        load, who = instance.load, [instance.manifest.name, instance.manifest.role.value]
        for what in BOOKED_KINDS:
            booked.add_metric([*who, what], getattr(instance, f"booked_{what}"))
        if load is None:
            continue
        for state in PAGE_STATES:
            pages.add_metric([*who, state], getattr(load, f"pages_{state}"))
        running.add_metric(who, load.running)
        waiting.add_metric(who, load.waiting)
        queued.add_metric(who, load.tokens_queued)
        preemptions.add_metric(who, load.preemptions)
    yield from (pages, booked, running, waiting, queued, preemptions)
