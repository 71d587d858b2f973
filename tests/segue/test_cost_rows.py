"""Benchmark rows become measurements, and a fit to the committed ones predicts them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from segue.cost_model import DecodeRow, PrefillRow
from segue.cost_rows import Measured, fit_rows, newest, read_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def row(shape: str, metric: str, value: str, unit: str) -> dict[str, str]:
    return {"shape": shape, "metric": metric, "value": value, "unit": unit}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row("64 x 8192", "step", "20.1", "ms"), DecodeRow(64, 64 * 8192.0, 20_100.0)),
        (row("decode, batch 8, after 128", "engine", "40", "tokens/s"), DecodeRow(8, 1024.0, 200_000.0)),
        (row("1 x 4096", "ttft", "0.1", "s"), PrefillRow(4096, 0, 100_000.0)),
        (row("128 on 8192 cached", "ttft", "9.5", "ms"), PrefillRow(128, 8192, 9_500.0)),
        (row("prefix hit 1024 + 16", "cached", "334", "ms"), PrefillRow(16, 1024, 334_000.0)),
        (row("prefill 1024", "engine", "512", "tokens/s"), PrefillRow(1024, 0, 2_000_000.0)),
    ],
)
def test_shapes_are_understood(given: dict[str, str], expected: PrefillRow | DecodeRow) -> None:
    measured = read_rows([given])
    assert [*measured.prefills, *measured.decodes] == [expected]


@pytest.mark.parametrize(
    "given",
    [
        row("prefill 1024", "transformers", "500", "tokens/s"),
        row("64 at once sharing 8192, cold", "mean ttft", "500", "ms"),
        row("256 x 1024", "host work", "0.7", "ms"),
        row("8 x 1024", "ttft", "100", "ms"),
    ],
)
def test_rows_of_other_things_are_left_out(given: dict[str, str]) -> None:
    assert read_rows([given]) == Measured(prefills=[], decodes=[])


def test_a_fit_to_the_measured_gpu_engine_is_within_eleven_percent() -> None:
    with (RESULTS / "gpu_engine_h200.csv").open(newline="") as file:
        fitted = fit_rows(read_rows(newest(list(csv.DictReader(file)))), kv_token_bytes=131_072)
    assert fitted.prefill_error_median < 0.06
    assert fitted.decode_error_median < 0.03
    assert max(fitted.prefill_error_max, fitted.decode_error_max) < 0.11


def test_rows_of_older_code_are_left_out() -> None:
    old, new = {"commit": "a1", "value": "1"}, {"commit": "b2", "value": "2"}
    assert newest([old, new, new]) == [new, new]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="needs as many rows"):
        fit_rows(Measured(prefills=[], decodes=[]), kv_token_bytes=1)
