"""Token choice on the device against the eager twin: greedy, seeded noise, ties, padding, NaN."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.sampling import RowState, SampleScratch, sample, sample_reference

VOCAB = 2100


def state_of(device: torch.device, temperatures: list[float]) -> RowState:
    rows = len(temperatures)
    words = torch.randint(-(2**31), 2**31 - 1, (rows, 2), generator=torch.Generator().manual_seed(1))
    return RowState(
        tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        positions=torch.arange(10, 10 + rows, dtype=torch.int32, device=device),
        temperatures=torch.tensor(temperatures, device=device),
        seeds=words.int().to(device),
    )


def copy_of(state: RowState) -> RowState:
    return RowState(state.tokens.clone(), state.positions.clone(), state.temperatures, state.seeds)


def logits_of(device: torch.device, batch: int, seed: int = 2) -> torch.Tensor:
    return (torch.randn(batch, VOCAB + 12, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


def run(logits: torch.Tensor, rows: list[int], state: RowState) -> torch.Tensor:
    device = logits.device
    results = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
    scratch = SampleScratch.allocate(len(rows), VOCAB, device)
    sample(logits, torch.tensor(rows, dtype=torch.int32, device=device), state, results, scratch, VOCAB)
    return results


@pytest.mark.parametrize("rows", [[2, 0, 3], [3, -1, 1, 0, 2, -1, -1, -1, -1]])
def test_tokens_and_state_equal_the_eager_twin(device: torch.device, rows: list[int]) -> None:
    state = state_of(device, [0.0, 1.0, 0.3, 2.5])
    expected_state, expected = copy_of(state), torch.empty(len(rows), dtype=torch.int32, device=device)
    logits = logits_of(device, len(rows))
    sample_reference(logits, torch.tensor(rows, device=device), expected_state, expected, VOCAB)
    assert torch.equal(run(logits, rows, state), expected)
    assert torch.equal(state.tokens, expected_state.tokens)
    assert torch.equal(state.positions, expected_state.positions)


def test_noise_is_that_of_its_own_seed_and_position_over_many_positions(device: torch.device) -> None:
    state = state_of(device, [1.0])
    flat = torch.zeros(1, VOCAB + 12, device=device)
    expected_state, expected = copy_of(state), torch.empty(1, dtype=torch.int32, device=device)
    drawn = set()
    for _ in range(12):
        sample_reference(flat, torch.zeros(1, dtype=torch.int64, device=device), expected_state, expected, VOCAB)
        assert torch.equal(run(flat, [0], state), expected)
        drawn.add(int(expected))
    assert len(drawn) > 6


def test_padded_vocabulary_is_never_chosen(device: torch.device) -> None:
    logits = logits_of(device, 2)
    logits[:, VOCAB:] = 1e9
    assert run(logits, [0, 1], state_of(device, [0.0, 1.0])).max() < VOCAB


def test_lowest_index_wins_a_tie(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB + 12, device=device)
    logits[0, [77, 1030, 2055]] = 5.0
    assert run(logits, [0], state_of(device, [0.0])).tolist() == [77]


def test_nan_fails_its_own_row_only(device: torch.device) -> None:
    logits = logits_of(device, 2)
    logits[0, 2000] = float("nan")
    results = run(logits, [0, 1], state_of(device, [0.0, 0.0]))
    assert results.tolist() == [-1, int(logits[1, :VOCAB].argmax())]


def test_minus_infinity_bans_a_token(device: torch.device) -> None:
    logits = torch.full((1, VOCAB + 12), float("-inf"), device=device)
    logits[0, 1500] = -3.0
    for temperature in (0.0, 1.0):
        assert run(logits, [0], state_of(device, [temperature])).tolist() == [1500]
