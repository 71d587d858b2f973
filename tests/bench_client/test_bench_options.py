"""What may be asked for, and how a slip is told."""

from __future__ import annotations

import random
import statistics

import pytest

from bench_client.lengths import Lengths, parse_lengths
from bench_client.options import BenchOptions, check_options, parse_token_ids
from bench_client.replay import Replay
from bench_client.slo import parse_slo
from segue.errors import ConfigError

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=2000ms,tpot=50ms", {"ttft": 2_000_000, "tpot": 50_000}),
        ("e2e=1.5s", {"e2e": 1_500_000}),
        ("ttft=300", {"ttft": 300_000}),
        ("tpot=900us", {"tpot": 900}),
        ("", {}),
    ],
)
def test_bounds_have_units(text: str, expected: dict[str, int]) -> None:
    assert parse_slo(text) == expected


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=-1ms", "speed=3ms", "ttft=1h", "ttft=0ms", "ttft=1ms,ttft=2ms", ","]
)
def test_a_bad_bound_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--slo: "):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("40", 40, 40, 40),
        ("uniform:10,30", 20, 10, 30),
        ("normal:100,10", 100, 50, 150),
        ("lognormal:100,0.1", 100, 50, 200),
    ],
)
def test_drawn_lengths_follow_their_distribution(text: str, mean: float, low: int, high: int) -> None:
    lengths, rng = parse_lengths(text, "--input-len"), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.05)


def test_a_length_is_never_below_one_token() -> None:
    assert {Lengths("normal", 1, 50).draw(random.Random(seed)) for seed in range(50)} >= {1}
    assert min(Lengths("normal", 1, 50).draw(random.Random(seed)) for seed in range(50)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "0",
        "-5",
        "1.5",
        "uniform:9",
        "uniform:9,3",
        "normal:5",
        "normal:5,-1",
        "zipf:1,2",
        "nan",
        "1e99",
        "uniform:1,inf",
    ],
)
def test_a_bad_length_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--output-len: "):
        parse_lengths(text, "--output-len")


def options(**given: object) -> BenchOptions:
    return BenchOptions(**{"url": URL, **given})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "--concurrency, --rate, --trace"),
        ({"concurrency": 2, "rate": 1.0, "requests": 1}, "--concurrency and --rate"),
        ({"concurrency": 2}, "--requests or --duration"),
        ({"concurrency": 0, "requests": 1}, "--concurrency: 0"),
        ({"rate": float("nan"), "requests": 1}, "--rate: nan"),
        ({"concurrency": 1, "requests": 0}, "--requests: 0"),
        ({"concurrency": 1, "seconds": -1.0}, "--duration: -1"),
        ({"concurrency": 1, "requests": 1, "url": "127.0.0.1:8000"}, "--url"),
        ({"concurrency": 1, "requests": 1, "endpoint": "embeddings"}, "--endpoint"),
        ({"rate": 1.0, "requests": 1, "arrival": "bursty"}, "--arrival"),
        ({"concurrency": 1, "requests": 1, "replay": Replay(speed=2)}, "--speed"),
        ({"concurrency": 1, "requests": 1, "endpoint": "chat", "token_ids": (1, 9)}, "--token-ids"),
        ({"concurrency": 1, "requests": 1, "temperature": 3.0}, "--temperature: 3"),
    ],
)
def test_options_that_make_no_run_are_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_options(options(**given))
    assert named in str(refusal.value)


@pytest.mark.parametrize("text", ["5", "9-3", "a-b", "-3", "1-2-3"])
def test_a_bad_range_of_token_ids_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--token-ids"):
        parse_token_ids(text)
