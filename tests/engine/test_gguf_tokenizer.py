"""The tokenizer built from GGUF metadata against one assembled here from vocabulary and merges alone."""

import gguf
import pytest
from test_smollm2 import gguf_path
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.engine import read_model
from engine.settings import Settings
from engine.tokenizer_gguf import tokenizer_from_gguf
from segue.config import EngineConfig
from segue.errors import ConfigError

TEXT = (
    "Hello world! In 2024, 1234567 people paid $3.50 (¼ of 14€).\n"
    "def f(x):\n\tif x >= 10:\n        return {'a': [1, 2]}  # don't, we'll, I'M\n"
    "日本語の文章、中文句子。한국어 문장 ๑๒๓ ٣٤٥ Ⅷ ²\n"
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff zero-width\r\n"
    "control \x00\x01\x1b[0m\x7f tabs\t\t\tend   \n\n\n  trailing  "
)


@pytest.fixture(scope="module")
def metadata():
    reader = gguf.GGUFReader(gguf_path())
    return {key: reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")}


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    card = read_model(str(gguf_path()), EngineConfig(device="cpu", pages=1)).card
    return Tokenizer.from_str(card.tokenizer_json)


@pytest.fixture(scope="module")
def reference(metadata) -> Tokenizer:
    """GPT-2's byte-level BPE with every number character on its own, specials by token type."""
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    tokenizer = Tokenizer(BPE(vocab, [tuple(merge.split(" ")) for merge in metadata["merges"]]))
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(gpt2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [t for t, kind in zip(metadata["tokens"], metadata["token_type"], strict=False) if kind == 3]
    )
    return tokenizer


@pytest.mark.parametrize("line", [*TEXT.splitlines(keepends=True), TEXT, "", " ", "\n"])
def test_ids_equal_the_reference(ours, reference, line):
    assert ours.encode(line).ids == reference.encode(line).ids


def test_digits_are_single_tokens(ours):
    assert [ours.id_to_token(index) for index in ours.encode("2024").ids] == ["2", "0", "2", "4"]


def test_decode_undoes_encode(ours):
    assert ours.decode(ours.encode(TEXT).ids, skip_special_tokens=False) == TEXT


def test_special_tokens_are_one_id(ours):
    assert ours.encode("<|im_start|>user").ids[0] == 1


def test_unknown_pre_tokenizer_lists_the_known():
    settings = Settings(
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "odd"}, "f.gguf"
    )
    with pytest.raises(ConfigError, match=r"f\.gguf.*'odd'.*llama-bpe.*smollm"):
        tokenizer_from_gguf(settings)


def sentencepiece_metadata(prefix: bool) -> Settings:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    for score, piece in enumerate(["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581ab"]):
        pieces.append(piece)
        kinds.append(1)
        scores.append({"ab": -2.0, "bc": -1.0, "abc": -3.0, "\u2581ab": -4.0}.get(piece, -100.0 - score))
    return Settings(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": prefix,
        },
        "sp.gguf",
    )


def test_sentencepiece_merges_best_score_first():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(prefix=False))
    assert tokenizer.encode("abc").tokens == ["abc"]
    assert tokenizer.encode("abcb").tokens == ["abc", "b"]
    assert tokenizer.encode(" ab").tokens == ["\u2581ab"]
    assert tokenizer.encode("abb").tokens == ["ab", "b"]


def test_sentencepiece_falls_back_to_bytes_and_back():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(prefix=True))
    ids = tokenizer.encode("é ab").ids
    assert [tokenizer.id_to_token(index) for index in ids][:3] == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "é ab"
