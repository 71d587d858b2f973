"""The cost model: forms, and fits that find the truth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.cost_model import (
    CostModel,
    DecodeCost,
    DecodeRow,
    PrefillCost,
    PrefillRow,
    attention_pairs,
    fit_decode,
    fit_link,
    fit_prefill,
)

PREFILL = PrefillCost(base_us=900.0, token_us=21.0, pair_us=0.0007, floor_us=2000.0)
DECODE = DecodeCost(base_us=7000.0, row_us=31.0, kv_token_us=0.06)
MODEL = CostModel(prefill=PREFILL, decode=DECODE, kv_token_bytes=327_680)

counts = st.integers(1, 100_000)


@given(first=counts, second=counts, cached=st.integers(0, 100_000))
def test_chunks_of_a_prompt_have_the_pairs_of_the_whole(first: int, second: int, cached: int) -> None:
    whole = attention_pairs(first + second, cached)
    assert attention_pairs(first, cached) + attention_pairs(second, cached + first) == pytest.approx(whole)


@given(new=counts, cached=counts)
def test_a_cached_prefix_saves_time_but_not_its_attention(new: int, cached: int) -> None:
    assert PREFILL.us(new) <= PREFILL.us(new, cached) <= PREFILL.us(new + cached)


def test_128k_tokens_of_which_80_percent_are_cached_save_about_69_percent() -> None:
    """LLaMA3-70B: 2 x 70.6e9 operations a token, 4 x 80 x 8192 a pair; time is proportional to operations."""
    cost = PrefillCost(base_us=0.0, token_us=2 * 70.6e9, pair_us=4.0 * 80 * 8192)
    total = 128 * 1024
    saved = 1 - cost.us(total - int(total * 0.8), int(total * 0.8)) / cost.us(total)
    assert saved == pytest.approx(0.69, abs=0.035)


def test_a_mixed_step_reads_the_weights_once() -> None:
    alone = PREFILL.us(2048) + DECODE.us(64, 100_000)
    together = MODEL.step_us([(2048, 0)], 64, 100_000)
    assert together == pytest.approx(alone - DECODE.base_us)


def test_a_step_without_chunks_is_a_decode_step() -> None:
    assert MODEL.step_us([], 8, 4096) == DECODE.us(8, 4096)


def test_nothing_to_do_takes_no_time() -> None:
    assert (PREFILL.us(0, 100), DECODE.us(0, 0)) == (0.0, 0.0)


def test_a_fit_of_noisy_prefills_predicts_unseen_ones() -> None:
    draw = random.Random(1)
    sizes = [(2 ** draw.randint(6, 15), draw.choice((0, 4096, 32768))) for _ in range(200)]
    rows = [PrefillRow(new, cached, PREFILL.us(new, cached) * draw.gauss(1, 0.03)) for new, cached in sizes]
    fitted = fit_prefill(rows)
    for new, cached in ((300, 0), (5000, 10_000), (20_000, 0), (1000, 60_000)):
        assert fitted.us(new, cached) == pytest.approx(PREFILL.us(new, cached), rel=0.08)


def test_a_fit_of_exact_decodes_finds_the_coefficients() -> None:
    rows = [
        DecodeRow(batch, kv, DECODE.us(batch, kv)) for batch in (1, 8, 64, 256) for kv in (1e3 * batch, 1e4 * batch)
    ]
    fitted = fit_decode(rows)
    assert (fitted.base_us, fitted.row_us, fitted.kv_token_us) == pytest.approx(
        (DECODE.base_us, DECODE.row_us, DECODE.kv_token_us), rel=1e-4
    )


def test_no_coefficient_is_negative_where_noise_would_make_one_so() -> None:
    rows = [DecodeRow(1, 10_000, 100.0), DecodeRow(2, 0, 101.0), DecodeRow(4, 0, 104.0), DecodeRow(8, 0, 109.0)]
    fitted = fit_decode(rows)
    assert min(fitted.base_us, fitted.row_us, fitted.kv_token_us) >= 0.0


def test_a_fit_needs_rows_and_positive_times() -> None:
    with pytest.raises(ValueError, match="needs as many rows"):
        fit_prefill([PrefillRow(10, 0, 5.0)])
    with pytest.raises(ValueError, match="positive times"):
        fit_decode([DecodeRow(1, 1, 1.0), DecodeRow(2, 2, 0.0), DecodeRow(3, 5, 1.0)])


def test_a_link_is_learned_from_transfers() -> None:
    sizes = [1e6, 8e6, 64e6, 512e6]
    link = fit_link(sizes, [200 + size / 12_500 for size in sizes])
    assert (link.latency_us, link.bytes_per_us) == pytest.approx((200, 12_500), rel=1e-3)


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="no rate"):
        fit_link([1e6, 2e6, 4e6], [400.0, 200.0, 100.0])
