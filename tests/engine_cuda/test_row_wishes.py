"""From sampling parameters to a row's words, and to tokens that equal the CPU engine's."""

from __future__ import annotations

import pytest
import torch
from segue_kernels.row_sampling import BIASES_AT, FLAGS, PENALISED, REPORTED, STOPS_AT, STOPS_UNTIL

from engine.cuda.row_wishes import RowWishes, place_words, row_wish
from engine.sampling_state import SamplingState
from segue.plan import BatchPlan, Chunk, RowStart, TokenLogprobs
from segue.sampling_params import SamplingParams
from tests.engine_cuda.driving import Request, generate, graph_engine, reference_engine


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=5),
        SamplingParams(temperature=0.0, top_k=5, top_p=0.3, min_p=0.1),
    ],
)
def test_rows_of_temperature_and_seed_alone_wish_nothing(params: SamplingParams) -> None:
    assert row_wish(params, 3, (2,), 100) is None


def test_a_row_keeps_its_stops_away_until_its_minimum_length() -> None:
    wish = row_wish(SamplingParams(min_tokens=4, stop_token_ids=(9, 500)), 10, (2,), 100)
    assert wish is not None
    words = wish.words()
    assert words[STOPS_UNTIL] == 14
    assert words[STOPS_AT : STOPS_AT + 2].tolist() == [2, 9]


def test_a_row_that_ignores_the_end_of_text_may_sample_it() -> None:
    wish = row_wish(SamplingParams(min_tokens=4, ignore_eos=True), 10, (2,), 100)
    assert wish is not None and not wish.stops


def test_biases_stand_in_the_order_of_their_tokens() -> None:
    wish = row_wish(SamplingParams(logit_bias={70: 1.5, 4: -2.0}), 1, (), 100)
    assert wish is not None
    assert wish.words()[BIASES_AT::2].tolist() == [4, 70]
    assert wish.words()[BIASES_AT + 1 :: 2].view("float32").tolist() == [-2.0, 1.5]


def test_a_seed_of_64_bits_keeps_all_of_them() -> None:
    words = place_words(SamplingParams(seed=0xFEDCBA9876543210))
    assert (words.seed_low & 0xFFFFFFFF, words.seed_high & 0xFFFFFFFF) == (0x76543210, 0xFEDCBA98)


def test_a_plain_sequence_in_a_row_of_wishes_has_none(device: torch.device) -> None:
    wishes = RowWishes(SamplingState(4, 100, 100, (2,), device), 4)
    words = wishes.general.table.words
    wishes.start(1, SamplingParams(frequency_penalty=0.5, logprobs=2), 3)
    assert int(words[1, FLAGS]) & (PENALISED | REPORTED) == PENALISED | REPORTED
    wishes.start(1, SamplingParams(temperature=0.0), 3)
    assert int(words[1, FLAGS]) == 0


WISHES: dict[str, SamplingParams] = {
    "filters": SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.01, seed=3),
    "penalties": SamplingParams(
        temperature=0.0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4, seed=4
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={20: 6.0, 21: 5.0, 7: 9.0}, min_tokens=2, seed=6),
    "plain": SamplingParams(temperature=0.8, seed=2**63 + 1),
}


def requests_with_wishes(tokens: int) -> dict[int, Request]:
    return {
        seq: Request(list(range(11, 16 + seq)), type(params)(**{**_fields(params), "max_tokens": tokens}))
        for seq, params in enumerate(WISHES.values())
    }


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.slow
def test_rows_with_wishes_share_steps_and_equal_the_plain_engine(device: torch.device) -> None:
    requests = requests_with_wishes(12 if device.type == "cuda" else 3)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=1) == expected


@pytest.mark.slow
def test_reported_log_probabilities_are_those_of_the_plain_engine(device: torch.device) -> None:
    """Of a token sampled from a chunk and of one from a decode, beside a row that reports nothing."""
    wanted = SamplingParams(temperature=0.0, logprobs=3, logit_bias={9: 50.0})
    starts = [
        RowStart(row, row + 1, list(range(20, 26)), 6, 0, [row], sampling)
        for row, sampling in enumerate((wanted, SamplingParams(temperature=0.0)))
    ]
    plans = [
        BatchPlan(op=1, starts=starts, chunks=[Chunk(0, 0, 6, True), Chunk(1, 0, 6, True)]),
        BatchPlan(op=2, decodes=[1, 0]),
    ]
    reports: list[list[list[TokenLogprobs] | None]] = []
    for engine in (reference_engine(), graph_engine(device)):
        reports.append([])
        for plan in plans:
            engine.launch(plan)
            reports[-1] += [entry.logprobs for entry in sorted(engine.collect().rows, key=lambda entry: entry.row)]
    assert [entry is None for entry in reports[1]] == [False, True, False, True]
    for expected, got in zip(reports[0], reports[1], strict=True):
        for one, other in zip(expected or [], got or [], strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [token for token, _ in other.top] == [token for token, _ in one.top]
            assert [value for _, value in other.top] == pytest.approx([value for _, value in one.top], abs=1e-4)


@pytest.mark.gpu
def test_rows_with_wishes_equal_the_plain_engine_over_many_steps_in_one_plan(device: torch.device) -> None:
    requests = requests_with_wishes(16)
    expected = generate(reference_engine(), requests)
    assert generate(graph_engine(device), requests, depth=1, steps_max=4) == expected
