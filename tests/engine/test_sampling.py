"""What is sampled follows the exact distribution of each filter, and depends on (logits, seed, position) alone."""

import math

import pytest
import torch
from segue_kernels.gumbel import gumbel_noise

from engine.gumbel_cpu import gumbel_noise_cpu
from engine.sampling import apply_filters, apply_penalties
from engine.sampling_state import SamplingState
from segue.sampling_params import SamplingParams

VOCAB = 11
DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.4, 1.1, 0.3, 0.0, -0.2, -0.7, -1.1, -1.9, -2.5, -4.0])
CPU = torch.device("cpu")


def sample(params: SamplingParams, logits: torch.Tensor = LOGITS, draws: int = DRAWS) -> torch.Tensor:
    """One token at each of `draws` positions, from the same logits: counts per token."""
    rows = 500
    wide = SamplingState(rows, VOCAB, VOCAB, (), CPU)
    for row in range(rows):
        wide.start(row, params, [1], 1)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for first in range(0, draws, rows):
        positions = torch.arange(first, first + rows)
        chosen = wide.choose(logits.repeat(rows, 1), tuple(range(rows)), positions, tuple(positions.tolist()))
        counts += torch.bincount(chosen.tokens, minlength=VOCAB)
    return counts


def exact(params: SamplingParams) -> torch.Tensor:
    """The distribution by definition, in float64, one filter after another."""
    p = (LOGITS.double() / params.temperature).softmax(-1)
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    if params.top_k:
        p = torch.where(torch.arange(VOCAB) < params.top_k, p, 0.0)
    p = p / p.sum()
    if params.top_p < 1:
        kept = int((p.cumsum(0) < params.top_p).sum()) + 1
        p = torch.where(torch.arange(VOCAB) < kept, p, 0.0)
    return p / p.sum()


def chi_square_is_plausible(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Within five standard deviations of the chi-square mean; tokens of probability 0 never occur."""
    possible = probabilities > 0
    if counts[~possible].sum() > 0:
        return False
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    return statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=3, seed=4),
        SamplingParams(top_p=0.7, seed=5),
        SamplingParams(min_p=0.2, seed=6),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05, seed=7),
        SamplingParams(top_p=1e-9, seed=8),
        SamplingParams(top_k=1, seed=9),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_samples_follow_the_exact_distribution(params):
    assert chi_square_is_plausible(sample(params), exact(params))


def test_chi_square_rejects_a_wrong_distribution():
    counts = sample(SamplingParams(temperature=1.0, seed=1))
    assert not chi_square_is_plausible(counts, exact(SamplingParams(temperature=1.1)))


def test_a_row_samples_the_same_alone_and_in_any_batch():
    torch.manual_seed(0)
    params = [SamplingParams(temperature=0.8 + 0.1 * i, top_p=0.9 if i % 2 else 1.0, seed=2**63 + i) for i in range(6)]
    logits = torch.randn(6, 300)
    positions = torch.arange(40, 46)
    state = SamplingState(6, 300, 300, (), CPU)
    for row, p in enumerate(params):
        state.start(row, p, [1, 2], 2)
    together = state.choose(logits.clone(), tuple(range(6)), positions, tuple(range(40, 46))).tokens
    order = (4, 0, 3)
    some = state.choose(logits[list(order)].clone(), order, positions[list(order)], order).tokens
    alone = [state.choose(logits[r : r + 1].clone(), (r,), positions[r : r + 1], (40 + r,)).tokens for r in range(6)]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(some, together[list(order)])


def test_rows_with_different_seeds_are_uncorrelated():
    pairs = 1000
    state = SamplingState(2 * pairs, VOCAB, VOCAB, (), CPU)
    for row in range(2 * pairs):
        state.start(row, SamplingParams(seed=10 + row % 2), [1], 1)
    positions = torch.arange(pairs).repeat_interleave(2)
    rows = tuple(range(2 * pairs))
    tokens = state.choose(LOGITS.repeat(2 * pairs, 1), rows, positions, tuple(positions.tolist())).tokens.view(-1, 2)
    same = int((tokens[:, 0] == tokens[:, 1]).sum())
    expected = (LOGITS.softmax(-1) ** 2).sum().item() * pairs
    assert abs(same - expected) < 5 * math.sqrt(expected)


def test_greedy_row_beside_random_rows():
    state = SamplingState(2, VOCAB, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0), [1], 1)
    state.start(1, SamplingParams(temperature=5.0, seed=3), [1], 1)
    tokens = {
        tuple(state.choose(LOGITS.repeat(2, 1), (0, 1), torch.tensor([p, p]), (p, p)).tokens.tolist())
        for p in range(50)
    }
    assert {first for first, _ in tokens} == {0}
    assert len(tokens) > 3


def test_padded_vocabulary_is_never_sampled():
    state = SamplingState(3, VOCAB - 4, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0), [1], 1)
    state.start(1, SamplingParams(temperature=9.0, seed=5), [1], 1)
    state.start(2, SamplingParams(temperature=1.0, top_k=VOCAB, seed=5, logprobs=5), [1], 1)
    for position in range(100):
        at = torch.full((3,), position)
        logits = LOGITS.flip(0).repeat(3, 1)
        chosen = state.choose(logits, (0, 1, 2), at, (position,) * 3)
        assert chosen.tokens.max() < VOCAB - 4
        assert chosen.top_ids is not None and chosen.top_ids.max() < VOCAB - 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_the_row_with_bad_logits_fails(bad):
    state = SamplingState(3, VOCAB, VOCAB, (), CPU)
    for row in range(3):
        state.start(row, SamplingParams(temperature=float(row), top_p=0.9, seed=4), [1], 1)
    clean = state.choose(LOGITS.repeat(3, 1), (0, 1, 2), torch.tensor([5, 5, 5]), (5, 5, 5))
    for victim in range(3):
        logits = LOGITS.repeat(3, 1)
        logits[victim, 6] = bad
        chosen = state.choose(logits, (0, 1, 2), torch.tensor([5, 5, 5]), (5, 5, 5))
        assert chosen.failed.tolist() == [row == victim for row in range(3)]
        others = [row for row in range(3) if row != victim]
        assert torch.equal(chosen.tokens[others], clean.tokens[others])


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    generated = torch.tensor([[2, 0, 1, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[False, True, False, False]])
    out = apply_penalties(logits, generated, in_prompt, torch.tensor([0.3]), torch.tensor([0.1]), torch.tensor([2.0]))
    torch.testing.assert_close(out, torch.tensor([[1.0 - 0.2 - 0.3, -4.0, 0.5 - 0.1 - 0.3, 0.5]]))


def test_penalties_include_the_very_last_token():
    state = SamplingState(2, VOCAB, VOCAB, (), CPU)
    state.start(1, SamplingParams(temperature=0.0, frequency_penalty=2.0), [9], 1)
    tokens = []
    for position in range(1, 5):
        chosen = state.choose(LOGITS[None].clone(), (1,), torch.tensor([position]), (position,))
        tokens.append(int(chosen.tokens))
    assert tokens == [0, 1, 2, 3]


def test_penalties_count_tokens_known_at_start_after_a_preemption():
    state = SamplingState(1, VOCAB, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0, presence_penalty=1.5), [5, 0], 1)
    assert int(state.choose(LOGITS[None].clone(), (0,), torch.tensor([2]), (2,)).tokens) == 1
    state.start(0, SamplingParams(temperature=0.0, presence_penalty=1.5), [5, 0], 2)
    assert int(state.choose(LOGITS[None].clone(), (0,), torch.tensor([2]), (2,)).tokens) == 0


def test_repetition_penalty_counts_the_prompt():
    state = SamplingState(1, VOCAB, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0, repetition_penalty=3.0), [0, 1], 2)
    assert int(state.choose(LOGITS[None].clone(), (0,), torch.tensor([2]), (2,)).tokens) == 2


def test_logit_bias_bans_and_forces():
    state = SamplingState(2, VOCAB, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0, logit_bias={0: -100.0, 1: -100.0}), [1], 1)
    state.start(1, SamplingParams(temperature=1.0, logit_bias={7: 100.0}, seed=1), [1], 1)
    chosen = state.choose(LOGITS.repeat(2, 1), (0, 1), torch.tensor([1, 1]), (1, 1))
    assert chosen.tokens.tolist() == [2, 7]


def test_min_tokens_bans_ends_until_reached():
    state = SamplingState(1, VOCAB, VOCAB, (0,), CPU)
    state.start(0, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,)), [4, 4, 4], 3)
    tokens = [int(state.choose(LOGITS[None].clone(), (0,), torch.tensor([p]), (p,)).tokens) for p in (3, 4, 5)]
    assert tokens == [2, 2, 0]


def test_logprobs_are_of_raw_logits():
    state = SamplingState(2, VOCAB, VOCAB, (), CPU)
    state.start(0, SamplingParams(temperature=0.0), [1], 1)
    state.start(1, SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 50.0}), [1], 1)
    chosen = state.choose(LOGITS.repeat(2, 1), (0, 1), torch.tensor([1, 1]), (1, 1))
    expected = LOGITS.log_softmax(-1)
    assert chosen.logprob_rows == (1,)
    torch.testing.assert_close(chosen.logprobs, expected[4:5])
    torch.testing.assert_close(chosen.top_values, expected[None, :3])
    assert chosen.top_ids.tolist() == [[0, 1, 2]]


def test_filters_never_empty_a_row():
    logits = torch.tensor([[1.0, 1.0, 1.0], [0.0, 5.0, 5.0]])
    out = apply_filters(logits, torch.tensor([1, 2]), torch.tensor([0.0, 1e-6]), torch.tensor([1.0, 1.0]))
    assert (out > float("-inf")).any(dim=-1).all()


def test_cpu_noise_is_the_shared_definition():
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    positions = torch.tensor([0, 7, 131071, 2**31, 5])
    ours, shared = gumbel_noise_cpu(seeds, positions, 1003), gumbel_noise(seeds, positions, 1003)
    torch.testing.assert_close(ours, shared, rtol=1e-6, atol=1e-6)
