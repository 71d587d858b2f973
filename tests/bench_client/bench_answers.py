"""What the scripted instances answer, and a tokenizer that knows words."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conductor.gateway.testing import Script
from conductor.ports import RoutedRequest


def full_answer(request: RoutedRequest) -> Script:
    """As many one-byte tokens as were asked for; the finish is the length."""
    count = request.sampling.max_tokens
    return Script(
        tokens=[65 + place % 20 for place in range(count + 1)], tokens_cached=len(request.token_ids) // 4 // 2
    )


def word_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Knows `words` with the space before them, and every other byte."""
    pieces = ["\u0120" + word for word in words]
    characters = sorted({*pre_tokenizers.ByteLevel.alphabet()})
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*characters, *pieces]))}
    merges = []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            vocab.setdefault(piece[:end], len(vocab))
            if (merge := (piece[: end - 1], piece[end - 1])) not in merges:
                merges.append(merge)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
