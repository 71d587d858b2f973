"""Prompts of an exact length, the same for the same seed, on every machine.

Tokens are drawn from an *alphabet*: tokens that the server's own tokenizer makes of ordinary words, so that no special
token is ever sent. Blocks of a trace are drawn from (seed, hash id) alone: equal ids are equal tokens, in any run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from bench_client.records import PlannedRequest

BLOCKS_CACHED_MAX = 4096
"""4,096 blocks of 512 ids are 17 MB as lists of shared ints; a trace's hot prefixes stay in."""


class Alphabet(msgspec.Struct, frozen=True):
    """`ids[i]` is the token of `pieces[i]`. `pieces` is empty when text of a known length cannot be made."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()


class PromptMaker:
    """`block_tokens` is the length of the blocks that hash ids name; 0 without any."""

    def __init__(self, alphabet: Alphabet, seed: int, block_tokens: int) -> None:
        self._alphabet = alphabet
        self._seed = seed
        self._block_tokens = block_tokens
        self._block = lru_cache(BLOCKS_CACHED_MAX)(self._draw_block)

    @property
    def makes_text(self) -> bool:
        return bool(self._alphabet.pieces)

    def token_ids(self, planned: PlannedRequest) -> list[int]:
        return [self._alphabet.ids[place] for place in self._places(planned)]

    def text(self, planned: PlannedRequest) -> str:
        """As many pieces as tokens are planned; a chat template's own tokens come on top."""
        return "".join(self._alphabet.pieces[place] for place in self._places(planned))

    def _places(self, planned: PlannedRequest) -> Sequence[int]:
        if not planned.hash_ids:
            return self._draw(f"{self._seed}/request/{planned.index}", planned.tokens_input)
        places = [place for hash_id in planned.hash_ids for place in self._block(hash_id)]
        return places[: planned.tokens_input]

    def _draw_block(self, hash_id: int) -> list[int]:
        return self._draw(f"{self._seed}/block/{hash_id}", self._block_tokens)

    def _draw(self, key: str, length: int) -> list[int]:
        return random.Random(key).choices(range(len(self._alphabet.ids)), k=length)
