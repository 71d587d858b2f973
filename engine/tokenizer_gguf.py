"""A Hugging Face tokenizer built from GGUF metadata.

GGUF stores vocabulary, merges or scores, and the *name* of the pre-tokenizer; what the name means is in the table
below. Byte-level BPE ("gpt2") and SentencePiece BPE ("llama") are covered.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.settings import Settings
from segue.errors import ConfigError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Token types of GGUF."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2 = ("gpt-2", "gpt2")
_DIGITS_GPT2 = ("smollm", "starcoder", "refact", "command-r")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


def tokenizer_from_gguf(settings: Settings) -> Tokenizer:
    """Build the tokenizer; ConfigError names an unknown model or pre-tokenizer and lists the known ones."""
    model = settings.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(settings)
    elif model == "llama":
        tokenizer = _sentencepiece(settings)
    else:
        raise ConfigError(f"{settings.source}: tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama")
    tokens, kinds = _tokens(settings)
    special = [AddedToken(tokens[i], special=True, normalized=False) for i, k in enumerate(kinds) if k == _CONTROL]
    plain = [AddedToken(tokens[i], special=False, normalized=False) for i, k in enumerate(kinds) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def _tokens(settings: Settings) -> tuple[list[str], list[int]]:
    tokens = settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{settings.source}: tokenizer.ggml.tokens is missing")
    kinds = settings.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ConfigError(f"{settings.source}: {len(tokens)} tokens but {len(kinds)} token types")
    return tokens, kinds


def _byte_level(settings: Settings) -> Tokenizer:
    tokens, _ = _tokens(settings)
    merges = [tuple(merge.split(" ", 1)) for merge in settings.get("tokenizer.ggml.merges", [])]
    pre = settings.text("tokenizer.ggml.pre", "gpt-2")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _LLAMA3))
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, settings.source)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in _GPT2:
        return by_regex
    if pre in _DIGITS_GPT2:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_regex])
    if pre in _LLAMA3 + _QWEN2:
        pattern = Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
    known = ", ".join(sorted(_GPT2 + _DIGITS_GPT2 + _LLAMA3 + _QWEN2))
    raise ConfigError(f"{source}: tokenizer.ggml.pre {pre!r} is not supported; known: {known}")


def _sentencepiece(settings: Settings) -> Tokenizer:
    """BPE whose merges are ranked by piece score, spaces written as U+2581, unknown characters as bytes."""
    tokens, kinds = _tokens(settings)
    scores = settings.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError(f"{settings.source}: tokenizer.ggml.scores must have one score for each token")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = merges_by_score(tokens, scores, kinds)
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = settings.flag("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefixed else replace
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a piece, the best-scored result first (SentencePiece's merge order)."""
    pieces = {token: index for index, token in enumerate(tokens) if kinds[index] in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in pieces.items():
        if kinds[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
