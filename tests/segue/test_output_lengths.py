"""Survival of answers: learned from ends, conditional on what was produced, honest about what was cut off."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.output_lengths import EDGES, PRIOR_MEAN_TOKENS, WINDOW, OutputLengths

lengths = st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), max_size=60)


def learned(answers: list[tuple[int, bool]]) -> OutputLengths:
    seen = OutputLengths()
    for tokens, cut_off in answers:
        seen.learn(tokens, cut_off=cut_off)
    return seen


def test_before_anything_is_known_answers_have_the_prior_mean() -> None:
    assert OutputLengths().remaining_mean(0, 1 << 20) == pytest.approx(PRIOR_MEAN_TOKENS, rel=0.01)


@given(answers=lengths, produced=st.integers(0, 30_000), more=st.integers(0, 30_000), further=st.integers(0, 30_000))
def test_survival_falls_and_multiplies_along_the_way(
    answers: list[tuple[int, bool]], produced: int, more: int, further: int
) -> None:
    seen = learned(answers)
    first, then = seen.survival(produced, more), seen.survival(produced + more, further)
    assert 1.0 >= first >= seen.survival(produced, more + further) >= 0.0
    assert first * then == pytest.approx(seen.survival(produced, more + further), abs=1e-9)


@given(answers=lengths, produced=st.integers(0, 30_000), left=st.integers(0, 5_000), quantile=st.floats(0.01, 0.99))
def test_a_quantile_is_survived_by_the_rest(
    answers: list[tuple[int, bool]], produced: int, left: int, quantile: float
) -> None:
    seen = learned(answers)
    within = seen.remaining_quantile(produced, quantile, left)
    assert 0 <= within <= left
    if 0 < within < left:
        assert seen.survival(produced, within) <= 1 - quantile + 1e-6
        assert seen.survival(produced, within - 1) >= 1 - quantile - 1e-6
    assert seen.remaining_mean(produced, left) <= left + 1e-6


def test_the_distribution_of_what_ended_is_found() -> None:
    draw = random.Random(1)
    seen = OutputLengths()
    for _ in range(2_000):
        seen.learn(max(1, round(draw.lognormvariate(math.log(200), 0.5))))
    assert seen.remaining_quantile(0, 0.5, 1 << 20) == pytest.approx(200, rel=0.1)
    assert seen.remaining_quantile(0, 0.9, 1 << 20) == pytest.approx(200 * math.exp(0.5 * 1.2816), rel=0.15)
    assert seen.remaining_mean(0, 1 << 20) == pytest.approx(200 * math.exp(0.125), rel=0.1)


def test_what_was_produced_matters() -> None:
    """Half of the answers have 10 tokens, half 1,000: whoever passed the short ones is one of the long ones."""
    seen = OutputLengths()
    for _ in range(200):
        seen.learn(10)
        seen.learn(1_000)
    assert seen.survival(0, 50) == pytest.approx(0.5, abs=0.05)
    assert seen.survival(50, 500) > 0.95
    assert seen.remaining_mean(50, 1 << 20) == pytest.approx(950, rel=0.15)


def test_answers_that_were_cut_off_do_not_shorten_the_forecast() -> None:
    """Every client allows 100 tokens: the true lengths, 400, show only in those that end before."""
    draw = random.Random(2)
    cut, naive = OutputLengths(), OutputLengths()
    for _ in range(4_000):
        wanted = max(1, round(draw.expovariate(1 / 400)))
        cut.learn(min(wanted, 100), cut_off=wanted > 100)
        naive.learn(min(wanted, 100))
    assert cut.survival(0, 100) == pytest.approx(math.exp(-100 / 400), abs=0.03)
    assert cut.survival(0, 100) > naive.survival(0, 100) + 0.1


def test_the_past_fades() -> None:
    seen = OutputLengths()
    for _ in range(4 * WINDOW):
        seen.learn(1_000)
    for _ in range(4 * WINDOW):
        seen.learn(20)
    assert seen.remaining_quantile(0, 0.8, 1 << 20) <= 24


def test_a_limit_bounds_what_is_to_come() -> None:
    assert OutputLengths().remaining_quantile(0, 0.99, 7) == 7
    assert OutputLengths().remaining_mean(0, 0) == 0.0


def test_buckets_are_four_to_an_octave_and_bounded() -> None:
    assert EDGES[:14] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert len(EDGES) == 4 + 4 * 18
