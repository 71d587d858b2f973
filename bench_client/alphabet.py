"""Which tokens prompts are made of: learned from the server's tokenizer, so that no tokenizer is needed here.

A word is of use when it is one token and stays one beside others; for a tokenizer without words (one token per byte)
single letters are. Both are checked with the server's `/tokenize`, never assumed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bench_client.prompts import Alphabet
from segue.errors import ConfigError

Tokenize = Callable[[str], Awaitable[list[int]]]
"""Text to ids, without special tokens."""

COMMON_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm difference value building action season
society tax director position player record paper space ground form event matter center project star
"""

WORDS = tuple(COMMON_NOUNS.split())

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

TOKENS_PER_WORD_MAX = 1.25
"""More tokens than this per word: the tokenizer has no words worth looking for one by one."""

PIECES_MIN = 8
"""Fewer different tokens make prompts that share prefixes by chance."""


async def learn_alphabet(tokenize: Tokenize) -> Alphabet:
    """Raise ConfigError when neither words nor letters are single tokens."""
    for pieces in (tuple(f" {word}" for word in WORDS), LETTERS):
        whole = await tokenize("".join(pieces))
        if len(whole) > TOKENS_PER_WORD_MAX * len(pieces):
            continue
        single = await _single(tokenize, pieces)
        if len(single) >= PIECES_MIN:
            return await _checked(tokenize, single)
    raise ConfigError(
        "the server's tokenizer knows neither common words nor letters as tokens; name ids with --token-ids"
    )


async def _single(tokenize: Tokenize, pieces: Sequence[str]) -> list[tuple[str, int]]:
    """Pieces that are one token each, by halving: one call says that a whole run of them is fine."""
    ids = await tokenize("".join(pieces))
    if len(ids) == len(pieces):
        return list(zip(pieces, ids, strict=True))
    if len(pieces) == 1:
        return []
    middle = len(pieces) // 2
    return [*await _single(tokenize, pieces[:middle]), *await _single(tokenize, pieces[middle:])]


async def _checked(tokenize: Tokenize, single: Sequence[tuple[str, int]]) -> Alphabet:
    """In another order and twice they must still be the same tokens, or lengths of texts would be wrong."""
    twice = [*reversed(single), *single]
    ids = await tokenize("".join(piece for piece, _ in twice))
    steady = ids == [token_id for _, token_id in twice]
    distinct = dict.fromkeys(token_id for _, token_id in single)
    return Alphabet(
        tuple(distinct), tuple(piece for piece, _ in single) if steady and len(distinct) == len(single) else ()
    )
