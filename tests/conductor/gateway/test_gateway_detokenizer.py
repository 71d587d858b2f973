import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.detokenizer import REPLACEMENT, make_detokenizer
from conductor.gateway.testing import byte_level_tokenizer, sentence_piece_tokenizer
from conductor.gateway.token_pieces import TokenPieces, decoder_rules
from segue.errors import ConfigError

TOKENIZERS = {"byte_level": byte_level_tokenizer(), "sentence_piece": sentence_piece_tokenizer()}
PIECES = {name: TokenPieces(tokenizer, decoder_rules(tokenizer.to_str())) for name, tokenizer in TOKENIZERS.items()}
HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family",
    "漢字かな交じり",
    "e\u0301 a\u0308\u0323 n\u0303",
    "\U0001d518\U0001d52b",
    "\ufffd in the text",
    "hello the world",
    "   spaces",
]

kinds = st.sampled_from(sorted(TOKENIZERS))


def deltas(kind: str, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(PIECES[kind], skip_special_tokens=skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_deltas_of_hard_texts_concatenate_to_the_text_without_added_replacements(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    parts = deltas(kind, ids)
    assert "".join(parts) == TOKENIZERS[kind].decode(ids)
    assert "".join(parts).count(REPLACEMENT) == text.count(REPLACEMENT)


@settings(max_examples=400)
@given(kind=kinds, data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_concatenate_to_the_full_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=24))
    assert "".join(deltas(kind, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(kind=kinds, text=st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character_on_the_way(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    shown = sum(part.count(REPLACEMENT) for part in deltas(kind, ids))
    assert shown == text.count(REPLACEMENT)


@given(text=st.text(max_size=30))
def test_byte_level_text_is_shown_as_soon_as_its_last_byte_is_there(text: str) -> None:
    ids = TOKENIZERS["byte_level"].encode(text, add_special_tokens=False).ids
    assert deltas("byte_level", ids)[-1] == ""


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("hello").ids, tokenizer.token_to_id("<|im_end|>")]
    assert "".join(deltas("byte_level", ids, skip=False)) == "hello<|im_end|>"
    assert "".join(deltas("byte_level", ids, skip=True)) == "hello"


def test_an_incomplete_character_at_the_end_becomes_a_replacement_as_in_the_full_decode() -> None:
    ids = TOKENIZERS["byte_level"].encode("é").ids[:1]
    assert deltas("byte_level", ids) == ["", REPLACEMENT]


@pytest.mark.parametrize("decoder", ['{"type":"WordPiece","prefix":"##","cleanup":true}', "null"])
def test_a_decoder_that_is_not_known_is_refused_by_name(decoder: str) -> None:
    with pytest.raises(ConfigError, match="decoder"):
        decoder_rules(f'{{"decoder":{decoder}}}')
