"""The numbers of a run, worked out by hand, and against what AIPerf computed from the same stamps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench_client.exchange import Seen
from bench_client.records import Exchange
from bench_client.summary import e2e_us, is_good, itl_us, spread_ms, summarise, tpot_us, ttft_us


def seen(
    sent_ms: int, *chunks_ms: int, tokens: int | None = None, cached: int | None = 0, **fields: object
) -> Exchange:
    given = {
        "index": 0,
        "tokens_input_planned": 100,
        "tokens_output_planned": len(chunks_ms),
        "sent_us": sent_ms * 1000,
        "content_us": tuple(at * 1000 for at in chunks_ms),
        "ended_us": max(chunks_ms, default=sent_ms) * 1000 + 500,
        "tokens_input": 100,
        "tokens_output": len(chunks_ms) if tokens is None else tokens,
        "tokens_cached": cached,
    }
    return Exchange(**{**given, **fields})


def test_the_four_latencies() -> None:
    exchange = seen(100, 150, 170, 230, tokens=5)
    assert (ttft_us(exchange), e2e_us(exchange), tpot_us(exchange)) == (50_000, 130_000, 20_000)
    assert itl_us(exchange) == [20_000, 60_000]


def test_one_token_has_no_tpot() -> None:
    assert tpot_us(seen(0, 10)) is None
    assert tpot_us(seen(0, 10, 20, tokens=None, tokens_output=None)) is None


def test_percentiles_interpolate() -> None:
    spread = spread_ms([1000.0, 2000.0, 3000.0, 4000.0, None])
    assert spread is not None
    assert (spread.count, spread.p50, spread.p90) == (4, 2.5, pytest.approx(3.7))


def test_rates_run_from_the_first_request_to_the_last_content() -> None:
    summary = summarise([seen(1000, 1500, 2000, cached=25), seen(1200, 1700, 3000, cached=75)], {}, [])
    assert summary.duration_s == 2.0
    assert (summary.requests_per_s, summary.tokens_output_per_s, summary.tokens_input_per_s) == (1.0, 2.0, 100.0)
    assert summary.cached_share == 0.5


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 50_000}, True),
        ({"ttft": 49_999}, False),
        ({"ttft": 50_000, "tpot": 40_000}, True),
        ({"ttft": 50_000, "tpot": 39_999}, False),
        ({"e2e": 129_999}, False),
    ],
)
def test_a_good_request_meets_every_bound(slo: dict[str, int], good: bool) -> None:
    assert is_good(seen(100, 150, 170, 230), slo) is good


def test_failed_requests_count_against_goodput_and_not_in_latencies() -> None:
    failed = seen(0, 5, error="http 429 overloaded", detail="queue full")
    summary = summarise([seen(0, 1000, 2000), failed, failed], {"ttft": 10**7}, [])
    assert (summary.good, summary.good_share, summary.goodput_per_s) == (1, pytest.approx(1 / 3), 0.5)
    assert summary.errors == {"http 429 overloaded": 2}
    assert summary.error_examples == {"http 429 overloaded": "queue full"}
    assert summary.ttft_ms is not None and summary.ttft_ms.minimum == 1000


def test_tokens_that_one_request_does_not_tell_are_not_summed() -> None:
    summary = summarise([seen(0, 10, 20), seen(0, 10, 20, tokens_output=None)], {}, [])
    assert summary.tokens_output is None and summary.tokens_output_per_s is None


def test_a_run_of_failures_only_has_no_latencies() -> None:
    summary = summarise([seen(0, error="timeout")], {"ttft": 1}, [])
    assert (summary.ttft_ms, summary.requests_per_s, summary.goodput_per_s, summary.cached_share) == (None, 0, 0, None)


def test_aiperf_computes_the_same_from_the_same_stamps(data: Path) -> None:
    records = json.loads((data / "aiperf_records.json").read_text())
    assert len(records) == 4
    for record in records:
        exchange, metrics = replayed(record), record["metrics"]
        assert exchange.tokens_output == metrics["output_sequence_length"]
        np.testing.assert_allclose(ttft_us(exchange), metrics["time_to_first_token"] * 1e3, rtol=1e-9)
        np.testing.assert_allclose(tpot_us(exchange), metrics["inter_token_latency"] * 1e3, rtol=1e-9)
        np.testing.assert_allclose(e2e_us(exchange), metrics["request_latency"] * 1e3, rtol=1e-9)
        np.testing.assert_allclose(itl_us(exchange), np.array(metrics["inter_chunk_latency"]) * 1e3, rtol=1e-9)


def replayed(record: dict) -> Exchange:  # type: ignore[type-arg]
    """What this client would have recorded; stamps keep their nanoseconds."""
    stream = Seen()
    for at_ns, events in record["chunks"]:
        for event in events:
            stream.event(event.encode(), at_ns / 1e3)  # type: ignore[arg-type]
    return seen(
        0,
        sent_us=record["start_perf_ns"] / 1e3,
        content_us=tuple(stream.content_us),
        tokens_output=stream.usage.completion_tokens,
    )
