"""Token choice on the device against the eager twin: greedy, seeded noise, ties, padding, NaN."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.decode_state import Places
from segue_kernels.sampling import SampleScratch, sample, sample_reference

VOCAB = 2100


def places_of(device: torch.device, rows: list[int], temperatures: list[float]) -> Places:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (Places.WORDS, len(rows)), generator=generator).int().to(device)
    places = Places.of(words)
    places.rows.copy_(torch.tensor(rows))
    places.positions.copy_(torch.arange(10, 10 + len(rows)))
    places.temperatures.copy_(torch.tensor(temperatures))
    return places


def copy_of(places: Places) -> Places:
    return Places(places.rows, places.positions.clone(), places.temperatures, places.seeds)


def logits_of(device: torch.device, batch: int, seed: int = 2) -> torch.Tensor:
    return (torch.randn(batch, VOCAB + 12, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


def run(logits: torch.Tensor, places: Places, tokens: torch.Tensor | None = None) -> torch.Tensor:
    device, batch = logits.device, places.rows.shape[0]
    tokens = table(device) if tokens is None else tokens
    results = torch.full((batch,), -7, dtype=torch.int32, device=device)
    sample(logits, places, tokens, results, SampleScratch.allocate(batch, VOCAB, device), VOCAB)
    return results


def table(device: torch.device) -> torch.Tensor:
    return torch.full((4, 40), -9, dtype=torch.int64, device=device)


@pytest.mark.parametrize("rows", [[2, 0, 3], [3, -1, 1, 0, 2, -1, -1, -1, -1]])
def test_tokens_and_positions_equal_the_eager_twin(device: torch.device, rows: list[int]) -> None:
    places = places_of(device, rows, [[0.0, 1.0, 0.3, 2.5][row % 4] for row in rows])
    logits, tokens, expected_tokens = logits_of(device, len(rows)), table(device), table(device)
    expected_places, expected = copy_of(places), torch.empty(len(rows), dtype=torch.int32, device=device)
    sample_reference(logits, expected_places, expected_tokens, expected, VOCAB)
    assert torch.equal(run(logits, places, tokens), expected)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(places.positions, expected_places.positions)


def test_noise_is_that_of_its_own_seed_and_position_over_many_positions(device: torch.device) -> None:
    places = places_of(device, [0], [1.0])
    flat = torch.zeros(1, VOCAB + 12, device=device)
    expected_places, expected = copy_of(places), torch.empty(1, dtype=torch.int32, device=device)
    drawn = set()
    for _ in range(12):
        sample_reference(flat, expected_places, table(device), expected, VOCAB)
        assert torch.equal(run(flat, places), expected)
        drawn.add(int(expected))
    assert len(drawn) > 6


def test_padded_vocabulary_is_never_chosen(device: torch.device) -> None:
    logits = logits_of(device, 2)
    logits[:, VOCAB:] = 1e9
    assert run(logits, places_of(device, [0, 1], [0.0, 1.0])).max() < VOCAB


def test_lowest_index_wins_a_tie(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB + 12, device=device)
    logits[0, [77, 1030, 2055]] = 5.0
    assert run(logits, places_of(device, [0], [0.0])).tolist() == [77]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_bad_logits_fails_alone(device: torch.device, bad: float) -> None:
    logits = logits_of(device, 2)
    logits[0, 2000] = bad
    tokens = table(device)
    results = run(logits, places_of(device, [0, 1], [0.0, 0.0]), tokens)
    assert results.tolist() == [-1, int(logits[1, :VOCAB].argmax())]
    assert tokens[0, 11] == 0


def test_minus_infinity_bans_a_token(device: torch.device) -> None:
    logits = torch.full((1, VOCAB + 12), float("-inf"), device=device)
    logits[0, 1500] = -3.0
    for temperature in (0.0, 1.0):
        assert run(logits, places_of(device, [0], [temperature])).tolist() == [1500]
