"""Costs learned while serving: from nothing, from a wrong start, and not away from a right one."""

from __future__ import annotations

import random

import pytest

from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.online_cost import REFIT_ROWS, OnlineCost

TRUE = CostModel(
    prefill=PrefillCost(base_us=1_000.0, token_us=50.0, pair_us=0.001),
    decode=DecodeCost(base_us=8_000.0, row_us=40.0, kv_token_us=0.05),
    kv_token_bytes=1,
)


def serve(cost: OnlineCost, count: int, noise: float = 0.05, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        new, cached = draw.randint(16, 8_000), draw.choice((0, 2_000))
        cost.observe_prefill(new, cached, TRUE.prefill.us(new, cached) * draw.gauss(1, noise))
        batch = draw.randint(1, 64)
        kv_tokens = batch * draw.randint(100, 4_000)
        cost.observe_decode(batch, kv_tokens, TRUE.decode.us(batch, kv_tokens) * draw.gauss(1, noise))


def error(cost: OnlineCost) -> float:
    assert cost.prefill is not None
    assert cost.decode is not None
    return max(
        abs(cost.prefill.us(3_000, 1_000) / TRUE.prefill.us(3_000, 1_000) - 1),
        abs(cost.decode.us(32, 50_000) / TRUE.decode.us(32, 50_000) - 1),
    )


def test_without_a_prior_nothing_is_known_before_the_first_fit() -> None:
    cost = OnlineCost()
    serve(cost, REFIT_ROWS - 1)
    assert not cost.is_known
    serve(cost, 1)
    assert cost.is_known
    assert error(cost) < 0.1


def test_a_wrong_prior_is_replaced() -> None:
    wrong = CostModel(
        prefill=PrefillCost(base_us=0.0, token_us=500.0, pair_us=0.0),
        decode=DecodeCost(base_us=100.0, row_us=1.0, kv_token_us=0.0),
        kv_token_bytes=1,
    )
    cost = OnlineCost(wrong)
    assert error(cost) > 0.5
    serve(cost, REFIT_ROWS)
    assert error(cost) < 0.1


def test_a_right_prior_stays_where_a_fit_knows_less() -> None:
    """Rows of one size fit everything at that size and nothing elsewhere."""
    cost = OnlineCost(TRUE)
    for _ in range(3 * REFIT_ROWS):
        cost.observe_prefill(1_000, 0, TRUE.prefill.us(1_000))
    assert cost.prefill is not None
    assert cost.prefill.us(100_000) == pytest.approx(TRUE.prefill.us(100_000), rel=0.01)


def test_times_that_mean_nothing_are_left_out() -> None:
    cost = OnlineCost()
    for _ in range(2 * REFIT_ROWS):
        cost.observe_prefill(10, 0, 0.0)
        cost.observe_decode(0, 10.0, 100.0)
    assert not cost.is_known
