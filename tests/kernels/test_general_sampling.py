"""Rows with penalties, biases, filters and log-probabilities against the eager twin, beside plain rows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from segue_kernels import general_sampling
from segue_kernels.decode_state import Places
from segue_kernels.general_sampling import GeneralSampling, general_reference
from segue_kernels.row_sampling import ALTERNATIVES_MAX, RowTable, RowWish
from segue_kernels.sampling import SampleScratch, sample, sample_reference

VOCAB, POSITION = 1500, 20


class Bench:
    """A batch of one row for each wish; None leaves a row plain."""

    def __init__(
        self,
        device: torch.device,
        wishes: list[RowWish | None],
        temperature: float,
        *,
        spread: float = 3.0,
        seed: int = 5,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = len(wishes)
        self.device, self.wishes, self.temperature = device, wishes, temperature
        self.logits = (torch.randn(batch, VOCAB + 3, generator=generator) * spread).to(device)
        self.logits[:, VOCAB:] = 1e9  # padding of the vocabulary
        words = torch.randint(-(2**31), 2**31 - 1, (Places.WORDS, batch), generator=generator).int().to(device)
        self.places = Places.of(words)
        self.places.rows.copy_(torch.arange(batch).flip(0))
        self.places.positions.fill_(POSITION - 1)
        self.places.temperatures.fill_(temperature)
        generated = torch.randint(0, 3, (batch, VOCAB + 3), generator=generator).int().to(device)
        in_prompt = (torch.rand(batch, VOCAB + 3, generator=generator) < 0.3).to(device)
        self.table = RowTable.allocate(generated, in_prompt)
        for place, wish in enumerate(wishes):
            if wish is not None:
                row_words = torch.from_numpy(wish.words())
                self.table.words[self.row(place), : len(row_words)] = row_words.to(device)
        self.general = GeneralSampling.allocate(self.table, batch, VOCAB)
        self.tokens = torch.zeros(batch, 64, dtype=torch.int64, device=device)

    def row(self, place: int) -> int:
        return len(self.wishes) - 1 - place

    def seed(self, place: int) -> int:
        low, high = (int(word) & 0xFFFFFFFF for word in self.places.seeds[:, place])
        return low | (high << 32)

    def run(self) -> list[int]:
        batch = len(self.wishes)
        results = torch.full((batch,), -7, dtype=torch.int32, device=self.device)
        scratch = SampleScratch.allocate(batch, VOCAB, self.device)
        sample(self.logits, self.places, self.tokens, results, scratch, VOCAB, general=self.general)
        return results.tolist()

    def expected(self, place: int) -> tuple[int, torch.Tensor]:
        wish = self.wishes[place]
        assert wish is not None
        row = self.row(place)
        position = int(self.places.positions[place]) + 1
        counts = self.table.generated[row, :VOCAB].cpu(), self.table.in_prompt[row, :VOCAB].cpu()
        logits = self.logits[place, :VOCAB].float().cpu()
        return general_reference(logits, wish, *counts, self.temperature, self.seed(place), position)


FILTERS = {
    "temperature": RowWish(),
    "top_k": RowWish(top_k=5),
    "top_k_of_most": RowWish(top_k=VOCAB - 1),
    "top_k_of_more": RowWish(top_k=VOCAB + 50),
    "top_p": RowWish(top_p=0.8),
    "small_top_p": RowWish(top_p=0.05),
    "min_p": RowWish(log_min_p=math.log(0.1)),
    "all": RowWish(top_k=40, top_p=0.9, log_min_p=math.log(0.01)),
    "penalties": RowWish(presence=0.7, frequency=0.4, repetition=1.3, top_p=0.95),
    "bias": RowWish(biases=((3, 40.0), (1499, -5.0), (700, 39.5)), top_k=3),
    "stops": RowWish(stops=(0, 63, 64, 1023, 1024), stops_until=POSITION + 1),
}


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_equal_the_eager_twin(device: torch.device, name: str) -> None:
    for seed in (1, 2):
        bench = Bench(device, [FILTERS[name]] * 2, 1.1, seed=seed)
        expected = [bench.expected(place) for place in range(2)]
        assert bench.run() == [token for token, _ in expected]
        for place, (_, scores) in enumerate(expected):
            assert torch.equal(bench.general.scratch.scores[place].cpu(), scores)


def test_flat_rows_are_searched_as_a_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_sampling, "LIST_MAX", 32)
    wishes: list[RowWish | None] = [RowWish(top_p=0.9), RowWish(top_k=900, top_p=0.9), RowWish(log_min_p=math.log(0.2))]
    bench = Bench(device, wishes, 1.0, spread=0.3)
    expected = [bench.expected(place)[0] for place in range(3)]
    assert bench.run() == expected


def test_ties_at_a_boundary_are_all_kept(device: torch.device) -> None:
    chosen = set()
    for seed in range(12):
        bench = Bench(device, [RowWish(top_k=1)], 1.0, seed=seed)
        bench.logits[0, :VOCAB] = torch.linspace(-5, 0, VOCAB)
        bench.logits[0, [10, 500, 1400]] = 2.0
        assert bench.expected(0)[0] in (10, 500, 1400)
        chosen.update(bench.run())
    assert chosen == {10, 500, 1400}


def test_plain_rows_beside_them_are_untouched(device: torch.device) -> None:
    bench = Bench(device, [RowWish(top_k=2), None, RowWish(top_p=0.5), None], 0.9)
    plain = Places(*(part[..., [1, 3]].contiguous() for part in dataclasses.astuple(bench.places)))
    expected = torch.empty(2, dtype=torch.int32, device=device)
    tokens = torch.zeros(4, 64, dtype=torch.int64, device=device)
    sample_reference(bench.logits[[1, 3]], plain, tokens, expected, VOCAB)
    chosen = bench.run()
    assert [chosen[1], chosen[3]] == expected.tolist()
    assert bench.places.positions.tolist() == [POSITION] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chosen_tokens_are_counted_for_penalties_only(device: torch.device, temperature: float) -> None:
    bench = Bench(device, [RowWish(frequency=0.5), RowWish(top_k=4)], temperature)
    before = bench.table.generated.clone()
    expected = [bench.expected(place)[0] for place in range(2)]
    assert bench.run() == expected
    added = bench.table.generated - before
    assert added[bench.row(0), expected[0]] == 1
    assert added.sum() == 1


def test_stops_may_come_from_their_position_on(device: torch.device) -> None:
    bench = Bench(
        device, [RowWish(stops=(9,), stops_until=POSITION), RowWish(stops=(9,), stops_until=POSITION + 1)], 0.0
    )
    bench.logits[:, 9] = 50.0
    first, second = bench.run()
    assert first == 9
    assert second != 9


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_bad_logits_fails_alone(device: torch.device, bad: float) -> None:
    bench = Bench(device, [RowWish(top_k=3, frequency=0.1), RowWish(top_k=3)], 1.0)
    expected, before = bench.expected(1)[0], bench.table.generated.clone()
    bench.logits[0, 1300] = bad
    assert bench.run() == [-1, expected]
    assert torch.equal(bench.table.generated, before)


def test_log_probabilities_are_those_of_raw_logits(device: torch.device) -> None:
    wishes: list[RowWish | None] = [RowWish(logprobs=ALTERNATIVES_MAX, biases=((4, 30.0),)), RowWish(logprobs=0), None]
    bench = Bench(device, wishes, 0.0)
    bench.logits[0, [100, 101, 102, 900]] = 12.0  # equal ones come in order
    chosen = bench.run()
    raw = bench.logits[:, :VOCAB].float().log_softmax(-1)
    report = bench.general.reports
    assert chosen[0] == 4
    torch.testing.assert_close(report[:2, 0], raw[[0, 1], chosen[:2]], atol=2e-6, rtol=1e-6)
    best = raw[0].sort(descending=True, stable=True)
    torch.testing.assert_close(
        report[0, 1 : 1 + ALTERNATIVES_MAX], best.values[:ALTERNATIVES_MAX], atol=2e-6, rtol=1e-6
    )
    ids = report[0, 1 + ALTERNATIVES_MAX :].view(torch.int32)
    assert ids.tolist() == best.indices[:ALTERNATIVES_MAX].tolist()


def test_bf16_logits_are_read_as_they_are(device: torch.device) -> None:
    bench = Bench(device, [RowWish(top_k=7, top_p=0.9)], 0.7)
    bench.logits = bench.logits.bfloat16()
    expected, _ = bench.expected(0)
    assert bench.run() == [expected]
