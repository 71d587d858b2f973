"""Text <-> token ids of one served model, made from its ModelCard alone: no weights, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import Any

import msgspec
from tokenizers import Tokenizer

from conductor.gateway.chat_template import ChatTemplate
from conductor.gateway.detokenizer import make_detokenizer
from conductor.gateway.text_stream import TextStream
from conductor.gateway.token_pieces import TokenPieces, decoder_rules
from segue.errors import ConfigError, InvalidField
from segue.model_card import ModelCard

INLINE_CHARACTERS_MAX = 2048
"""Longer texts are tokenised in a thread: 2 kB costs about 0.3 ms, which a loop of 64 streams can bear."""


class TextCodec:
    """Raises ConfigError when the card's tokenizer or template cannot be used."""

    def __init__(self, card: ModelCard, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        except Exception as error:  # the binding raises bare Exception
            raise ConfigError(f"model {card.name}: tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.card = card
        self.pieces = TokenPieces(self._tokenizer, decoder_rules(card.tokenizer_json))
        self._template = ChatTemplate(card.chat_template, card.special_tokens, now) if card.chat_template else None
        self._piece_bytes_max = _piece_bytes_max(self._tokenizer, card.tokenizer_json)

    async def encode(self, text: str, pool: Executor, *, add_bos: bool = True) -> list[int]:
        """Token ids of plain text, after `bos_ids` when `add_bos`. Long texts go to `pool`."""
        if len(text) <= INLINE_CHARACTERS_MAX:
            return self.encode_now(text, add_bos=add_bos)
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: self.encode_now(text, add_bos=add_bos))

    def encode_now(self, text: str, *, add_bos: bool = True) -> list[int]:
        """The batch call, because `encode` keeps the GIL for as long as it runs (600 kB: 0.6 s) and this one does not.

        Raises InvalidField for text that no UTF-8 can express (lone surrogates).
        """
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise InvalidField("prompt", "holds lone surrogates, which are not text") from error
        return [*self.card.bos_ids, *ids] if add_bos else ids

    async def encode_chat(self, rendered: str, pool: Executor) -> list[int]:
        """Token ids of a rendered conversation; `bos_ids` only when the template did not write them itself."""
        ids = await self.encode(rendered, pool, add_bos=False)
        bos = list(self.card.bos_ids)
        return ids if ids[: len(bos)] == bos else bos + ids

    def tokens_at_least(self, text: str) -> int:
        """A lower bound on the tokens of `text`, without tokenising it (0 when nothing can be said)."""
        return len(text) // self._piece_bytes_max if self._piece_bytes_max else 0

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Raise InvalidField when the model has no chat template or the template refuses."""
        if self._template is None:
            raise InvalidField("messages", f"model {self.card.name} has no chat template; use completions")
        return self._template.render(messages, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.pieces[token_id]
        return b"" if piece is None else piece.data

    def token_text(self, token_id: int) -> str:
        """One token alone, special or not; incomplete characters show as replacement characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def stream(self, stops: Sequence[str], *, skip_special_tokens: bool, tokens_free: int = 0) -> TextStream:
        detokenizer = make_detokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
        return TextStream(detokenizer, stops, tokens_free=tokens_free)


def _piece_bytes_max(tokenizer: Tokenizer, tokenizer_json: str) -> int:
    """Bytes of the longest token when tokens cover the text byte by byte (no normalizer); else 0: no bound known."""
    if msgspec.json.decode(tokenizer_json).get("normalizer") is not None:
        return 0
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return 0
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)
