"""Models and nodes: what follows from their numbers."""

from __future__ import annotations

import pytest

from simulator.hardware import MODELS, NODES, Instance, fetch_break_even_bytes_s


@pytest.mark.parametrize(("flops_s", "published_gb_s"), [(8 * 312e12, 6.0), (8 * 989e12, 19.0)])
def test_fetching_beats_computing_from_the_published_bandwidth_on(flops_s: float, published_gb_s: float) -> None:
    assert fetch_break_even_bytes_s("llama3-70b", 8_192, flops_s) / 1e9 == pytest.approx(published_gb_s, rel=0.03)


def test_daily_tokens_of_a_node_agree_with_its_throughput() -> None:
    """Claim C7: 608B tokens in and 168B out a day; 73.7k in or 14.8k out per node and second; 226.75 nodes."""
    nodes_prefill, nodes_decode = 608e9 / 86_400 / 73.7e3, 168e9 / 86_400 / 14.8e3
    assert nodes_prefill + nodes_decode == pytest.approx(226.75, rel=0.01)


def test_a_70b_prefill_is_as_fast_as_its_operations() -> None:
    cost = Instance(model="llama2-70b", node="a800", mfu=0.5).cost_model()
    assert cost.prefill.us(8_192) / 1e6 == pytest.approx(2 * 68.98e9 * 8_192 / (8 * 312e12 * 0.5), rel=0.1)


def test_a_decode_step_reads_weights_and_cache_once() -> None:
    cost = Instance(model="llama3.1-8b", node="h200", accelerators=1, mbu=1.0).cost_model()
    weights_us, cache_us = 16.06e9 / 4.8e6, 100_000 * 131_072 / 4.8e6
    assert cost.decode.us(1, 100_000) == pytest.approx(weights_us + cache_us, rel=0.1)


def test_kv_token_bytes_are_the_models_own() -> None:
    assert MODELS["llama3-70b"].kv_token_bytes() == 327_680
    assert MODELS["llama3.1-8b"].kv_token_bytes() == 131_072
    assert MODELS["deepseek-v3"].kv_token_bytes() == 70_272


def test_every_number_has_a_source() -> None:
    assert all(entry.source for entry in (*MODELS.values(), *NODES.values()))


def test_what_does_not_fit_or_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 1 accelerators of a800"):
        Instance(model="llama3-70b", node="a800", accelerators=1).kv_tokens_total()
    with pytest.raises(ValueError, match="a800 has no peak for fp8"):
        Instance(model="llama3-70b", node="a800", weights="fp8").cost_model()
    with pytest.raises(ValueError, match="unknown model 'gpt'; known: deepseek-v3"):
        Instance(model="gpt", node="a800").cost_model()
