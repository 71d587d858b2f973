"""Prompts have exactly the planned length, and share exactly what their hash ids say."""

from __future__ import annotations

import pytest
from bench_answers import word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench_client.alphabet import LETTERS, WORDS, learn_alphabet
from bench_client.prompts import Alphabet, PromptMaker
from bench_client.records import PlannedRequest
from conductor.gateway.testing import byte_level_tokenizer
from segue.errors import ConfigError

ALPHABET = Alphabet(tuple(range(1000, 1200)), tuple(f" w{index}" for index in range(200)))


def planned(index: int, tokens: int, *hash_ids: int) -> PlannedRequest:
    return PlannedRequest(index=index, tokens_input=tokens, tokens_output=1, hash_ids=hash_ids)


def shared(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


@given(seed=st.integers(0, 9), tokens=st.integers(1, 300), hashed=st.booleans())
def test_lengths_are_exact_and_tokens_from_the_alphabet(seed: int, tokens: int, hashed: bool) -> None:
    ids = tuple(range(-(-tokens // 64))) if hashed else ()
    prompt = PromptMaker(ALPHABET, seed, 64).token_ids(planned(3, tokens, *ids))
    assert len(prompt) == tokens
    assert set(prompt) <= set(ALPHABET.ids)


def test_equal_hash_ids_are_equal_tokens_in_any_run() -> None:
    one = PromptMaker(ALPHABET, 5, 64).token_ids(planned(0, 192, 7, 8, 9))
    other = PromptMaker(ALPHABET, 5, 64).token_ids(planned(1, 160, 7, 8, 11))
    assert shared(one, other) == 128


def test_a_partial_last_block_is_a_prefix_of_the_whole_block() -> None:
    prompts = PromptMaker(ALPHABET, 5, 64)
    assert shared(prompts.token_ids(planned(0, 100, 7, 8)), prompts.token_ids(planned(1, 128, 7, 8))) == 100


def test_prompts_without_hash_ids_share_nothing_to_speak_of() -> None:
    prompts = PromptMaker(ALPHABET, 5, 0)
    assert shared(prompts.token_ids(planned(0, 64)), prompts.token_ids(planned(1, 64))) < 4


def test_another_seed_makes_other_prompts() -> None:
    one, other = (PromptMaker(ALPHABET, seed, 64).token_ids(planned(0, 64, 7)) for seed in (1, 2))
    assert shared(one, other) < 4


def tokenize_with(tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    async def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return tokenize


async def test_words_that_are_single_tokens_make_the_alphabet() -> None:
    known = WORDS[:-5]
    tokenizer = word_tokenizer(known)
    alphabet = await learn_alphabet(tokenize_with(tokenizer))
    assert alphabet.pieces == tuple(f" {word}" for word in known)
    text = PromptMaker(alphabet, 1, 0).text(planned(0, 200))
    assert len(tokenizer.encode(text).ids) == 200


async def test_a_tokenizer_of_bytes_is_asked_for_letters() -> None:
    alphabet = await learn_alphabet(tokenize_with(byte_level_tokenizer()))
    assert alphabet.ids == tuple(byte_level_tokenizer().token_to_id(letter) for letter in LETTERS)


async def test_a_tokenizer_without_either_is_told() -> None:
    async def tokenize(text: str) -> list[int]:
        return [0] * (3 * len(text))

    with pytest.raises(ConfigError, match="--token-ids"):
        await learn_alphabet(tokenize)
