"""Bounds hold as often as they claim, errors are corrected, and drifts are seen and made up for."""

from __future__ import annotations

import random

import pytest

from segue.calibration import CAREFUL_FACTOR, Calibration, Drift


def calibrated(draw: random.Random, ratio: float, noise: float, steps: int, seen: Calibration) -> Calibration:
    for _ in range(steps):
        predicted_us = draw.uniform(1e3, 1e6)
        seen.observe(predicted_us, predicted_us * ratio * draw.gauss(1, noise))
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_coverage_of_the_bound_is_its_aim_with_ten_percent_noise(seed: int) -> None:
    seen = calibrated(random.Random(seed), 1.0, 0.1, 2000, Calibration())
    assert seen.coverage == pytest.approx(0.9, abs=0.02)
    assert seen.quantile_us(1000.0) == pytest.approx(1128, rel=0.05)
    assert seen.drift is Drift.NONE


def test_a_systematic_error_is_corrected() -> None:
    seen = calibrated(random.Random(3), 1.4, 0.05, 300, Calibration())
    assert seen.correct_us(1000.0) == pytest.approx(1400, rel=0.03)


def test_a_drift_is_seen_and_made_up_for() -> None:
    draw = random.Random(4)
    seen = calibrated(draw, 1.0, 0.1, 600, Calibration())
    calibrated(draw, 2.0, 0.1, 12, seen)
    assert seen.drift is Drift.OPTIMISTIC
    calibrated(draw, 2.0, 0.1, 1500, seen)
    assert seen.drift is Drift.NONE
    assert seen.coverage == pytest.approx(0.9, abs=0.02)


def test_bounds_that_do_not_hold_are_widened() -> None:
    draw = random.Random(4)
    seen = calibrated(draw, 1.0, 0.1, 600, Calibration())
    calibrated(draw, 2.0, 0.1, 12, seen)
    largest_seen = 2.0 * 1.4
    assert CAREFUL_FACTOR < seen.quantile_us(1.0) < CAREFUL_FACTOR * largest_seen
    assert seen.quantile_us(1.0) > 1.9


def test_bounds_that_always_hold_are_named_pessimistic() -> None:
    draw = random.Random(5)
    seen = calibrated(draw, 1.0, 0.3, 600, Calibration())
    for _ in range(220):
        seen.observe(1000.0, 400.0)
    assert seen.drift is Drift.PESSIMISTIC


def test_a_steady_stream_raises_no_alarm() -> None:
    alarms = 0
    for seed in range(20):
        draw, seen = random.Random(seed), Calibration()
        for _ in range(1000):
            seen.observe(1000.0, 1000.0 * draw.gauss(1, 0.1))
            alarms += seen.drift is not Drift.NONE
    assert alarms < 0.02 * 20 * 1000


def test_before_anything_is_known_the_bound_is_the_prior() -> None:
    seen = Calibration(prior_ratio=2.0)
    assert (seen.quantile_us(100.0), seen.coverage, seen.drift, seen.is_ready) == (200.0, None, Drift.NONE, False)


def test_impossible_aims_are_refused() -> None:
    with pytest.raises(ValueError, match="impossible"):
        Calibration(aim=1.0)
