"""The forecast of a decode instance: what is coming counts, what runs fades as answers end, sums stay exact."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.decode_load import DecodeLoad
from segue.ids import AttemptRef
from segue.output_lengths import OutputLengths

LIMIT = 1 << 16


def key(number: int) -> AttemptRef:
    return AttemptRef(f"r{number}", 1)


def running(count: int, tokens: int = 100) -> DecodeLoad:
    load = DecodeLoad()
    for number in range(count):
        load.book(key(number), tokens)
        load.land(key(number), tokens, 0, LIMIT)
    return load


def exponential(mean: int, seed: int = 1) -> OutputLengths:
    draw, lengths = random.Random(seed), OutputLengths()
    for _ in range(3_000):
        lengths.learn(max(1, round(draw.expovariate(1 / mean))))
    return lengths


def test_prefill_in_the_pipeline_is_load_at_landing() -> None:
    load = DecodeLoad()
    load.book(key(1), 500)
    load.book(key(2), 700)
    assert load.running().batch == 0
    assert tuple(getattr(load.ahead(1_000, OutputLengths()), name) for name in ("batch", "kv_tokens")) == (2.0, 1_200.0)


def test_rows_fade_as_answers_end() -> None:
    load = running(64)
    now, later = load.ahead(0, exponential(200)), load.ahead(200, exponential(200))
    assert now.batch == 64
    assert later.batch == pytest.approx(64 / 2.718, rel=0.1)


def test_those_that_stay_have_grown() -> None:
    load = running(10, tokens=1_000)
    later = load.ahead(200, exponential(100_000))
    assert later.kv_tokens / later.batch == pytest.approx(1_200, abs=20)


def test_the_forecast_is_conditional_on_what_was_produced() -> None:
    """Half of the answers have 10 tokens, half 1,000. Rows that have 100 already will be there in 500 steps."""
    lengths = OutputLengths()
    for _ in range(200):
        lengths.learn(10)
        lengths.learn(1_000)
    load = running(32)
    fresh = load.ahead(500, lengths).batch
    load.advance(1_000_000, 10_000.0)  # 100 steps of 10 ms
    assert fresh == pytest.approx(16, rel=0.2)
    assert load.ahead(500, lengths).batch > 30


def test_nobody_runs_past_the_limit_that_its_client_set() -> None:
    load = DecodeLoad()
    load.book(key(1), 50)
    load.land(key(1), 50, 0, 64)
    assert load.ahead(32, exponential(100_000)).batch == pytest.approx(1.0, rel=0.01)
    assert load.ahead(200, exponential(100_000)).batch == 0.0


def test_others_rows_are_load_too() -> None:
    load = running(2)
    load.others_rows, load.others_tokens = 3, 900
    assert load.running().batch == 5
    assert load.ahead(0, OutputLengths()).kv_tokens >= 900


moves = st.lists(st.tuples(st.sampled_from(("book", "land", "remove", "wait")), st.integers(0, 12)), max_size=80)


@given(moves)
def test_sums_are_those_of_a_plain_model(steps: list[tuple[str, int]]) -> None:
    load, coming, rows, clock, now_us = DecodeLoad(), {}, {}, 0.0, 0
    for move, number in steps:
        who = key(number)
        if move == "book" and who not in coming and who not in rows:
            load.book(who, 10 + number)
            coming[who] = 10 + number
        elif move == "land":
            load.land(who, 10 + number, 0, LIMIT)
            if coming.pop(who, None) is not None:
                rows[who] = clock
        elif move == "remove":
            load.remove(who)
            coming.pop(who, None)
            rows.pop(who, None)
        elif move == "wait":
            now_us += number * 1_000
            load.advance(now_us, 1_000.0)
            clock += number if rows else 0
        load.check()
    present = load.ahead(0, OutputLengths())
    assert present.batch == len(coming) + len(rows)
    assert load.running().batch == len(rows)
