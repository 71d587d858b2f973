import math

import pytest

from conductor.gateway.intake import choice_seed
from conductor.gateway.request_fields import ModelLimits, SamplingFields, pack_token_ids, unpack_token_ids
from conductor.gateway.validate import check_choices, check_request_id, validate
from segue.errors import InvalidField

MODEL = ModelLimits(vocab_size=100, max_model_len=32)


def check(prompt: list[int] | None = None, **fields: object):  # type: ignore[no-untyped-def]
    return validate(SamplingFields(**fields), [1, 2, 3] if prompt is None else prompt, MODEL, seed_drawn=7)


REFUSED = [
    ({"temperature": math.nan}, "temperature", "finite"),
    ({"temperature": math.inf}, "temperature", "finite"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": 2.1}, "temperature", "at most 2"),
    ({"top_p": 0.0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "at most 1"),
    ({"top_p": math.nan}, "top_p", "finite"),
    ({"min_p": 1.5}, "min_p", "at most 1"),
    ({"min_p": -0.5}, "min_p", "at least 0"),
    ({"top_k": -2}, "top_k", "at least 0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "at least -2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "greater than 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 30}, "max_tokens", "at most 29 fit"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "0 .. 4"),
    ({"min_tokens": -1}, "min_tokens", "0 .."),
    ({"logit_bias": {100: 1.0}}, "logit_bias", "0 .. 99"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "0 .. 99"),
    ({"logit_bias": {1: 101.0}}, "logit_bias", "-100 .. 100"),
    ({"logit_bias": {1: math.nan}}, "logit_bias", "-100 .. 100"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "at most 1024"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": ["ok", ""]}, "stop[1]", "empty"),
    ({"stop": ["é" * 129]}, "stop[0]", "at most 256"),
    ({"stop_token_ids": [100]}, "stop_token_ids", "0 .. 99"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    ({"logprobs": 21}, "logprobs", "0 .. 20"),
    ({"logprobs": -1}, "logprobs", "0 .. 20"),
    ({"seed": 1 << 64}, "seed", "64 bits"),
]


@pytest.mark.parametrize(("fields", "name", "limit"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_error_names_the_field_and_its_limit(fields: dict[str, object], name: str, limit: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check(**fields)
    assert caught.value.field == name
    assert limit in caught.value.message


def test_an_error_uses_the_name_that_the_client_sent() -> None:
    with pytest.raises(InvalidField) as caught:
        check(max_tokens=0, names={"max_tokens": "max_completion_tokens"})
    assert caught.value.field == "max_completion_tokens"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidField, match="prompt: is empty"):
        check([])


def test_a_prompt_that_fills_the_model_is_refused_and_told_by_how_much() -> None:
    with pytest.raises(InvalidField, match="has 32 tokens, 1 more than the 31"):
        check([1] * 32)


def test_a_prompt_that_leaves_one_token_is_taken_and_gets_one() -> None:
    assert check([1] * 31).sampling.max_tokens == 1


@pytest.mark.parametrize("wrong", [100, -1, 1 << 40])
def test_a_token_id_out_of_range_is_named_with_its_index(wrong: int) -> None:
    with pytest.raises(InvalidField, match=f"token id {wrong} at index 1"):
        check([5, wrong])


def test_defaults_fill_what_the_client_left_out() -> None:
    checked = check()
    assert checked.sampling.max_tokens == 29
    assert (checked.sampling.temperature, checked.sampling.top_p, checked.sampling.seed) == (1.0, 1.0, 7)
    assert checked.skip_special_tokens and not checked.stops


def test_a_default_of_max_tokens_shrinks_to_what_is_left() -> None:
    checked = validate(SamplingFields(), [1] * 30, MODEL, seed_drawn=0, max_tokens_default=16)
    assert checked.sampling.max_tokens == 2


@pytest.mark.parametrize(("top_k", "meant"), [(-1, 0), (0, 0), (5, 5), (100, 0), (1000, 0)])
def test_top_k_off_has_three_spellings(top_k: int, meant: int) -> None:
    assert check(top_k=top_k).sampling.top_k == meant


def test_a_negative_seed_keeps_its_64_bits() -> None:
    assert check(seed=-1).sampling.seed == (1 << 64) - 1


@pytest.mark.parametrize("request_id", ["x" * 129, "é" * 65, "line\nbreak", "\x00"])
def test_a_request_id_is_bounded_and_printable(request_id: str) -> None:
    with pytest.raises(InvalidField, match="request_id"):
        check_request_id(request_id)


@pytest.mark.parametrize("n", [0, -1, 17])
def test_n_is_bounded(n: int) -> None:
    with pytest.raises(InvalidField, match=r"n: .* 1 \.\. 16"):
        check_choices(n, None, 1)


@pytest.mark.parametrize(("n", "best_of", "expected"), [(None, None, (1, 1)), (3, None, (3, 3)), (2, 5, (2, 5))])
def test_choices_answered_and_sampled(n: int | None, best_of: int | None, expected: tuple[int, int]) -> None:
    assert check_choices(n, best_of, 1) == expected


def test_packed_ids_are_little_endian_u32() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_token_ids(pack_token_ids([0, 7, 2**32 - 1])) == [0, 7, 2**32 - 1]


def test_choices_have_seeds_of_their_own_and_the_first_keeps_the_requests() -> None:
    seeds = [choice_seed(42, choice) for choice in range(16)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert seeds == [choice_seed(42, choice) for choice in range(16)]
    assert not set(seeds[1:]) & {choice_seed(43, choice) for choice in range(16)}
