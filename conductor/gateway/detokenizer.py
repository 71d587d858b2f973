"""Incremental detokenisation: token ids in, text out, and the pieces concatenate exactly to the full decode.

A character whose bytes are spread over several tokens is held back until it is whole, so no replacement character ever
appears in the middle of a stream for bytes that are still to come. `flush` ends the text: what is still incomplete
then becomes replacement characters, as the full decode has them.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from conductor.gateway.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """Text that became certain with this token."""

    def flush(self) -> str:
        """The rest, when no token follows."""


class ByteLevelDetokenizer:
    """Concatenates token bytes and decodes UTF-8 incrementally (replacement per maximal subpart, as in Rust).

    Most tokens are whole characters after whole characters: their text is known, and no decoder is asked."""

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None or (self._skip_special and piece.special):
            return ""
        if piece.text is not None and not self._is_inside_character:
            return piece.text
        text = self._utf8.decode(piece.data)
        self._is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SentencePieceDetokenizer:
    """Holds a run of byte tokens until it ends: whether it is text at all is only known then."""

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special_tokens
        self._run = bytearray()
        self._strip_left = pieces.rules.strip_count

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None or (self._skip_special and piece.special):
            return ""
        if piece.text is None:
            self._run += piece.data
            return ""
        return self._strip(self._end_run() + piece.text)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        start = 0
        while self._strip_left and start < len(text):
            if text[start] != self._pieces.rules.strip_content:
                self._strip_left = 0
                break
            self._strip_left -= 1
            start += 1
        return text[start:]


def make_detokenizer(pieces: TokenPieces, *, skip_special_tokens: bool) -> Detokenizer:
    kind = ByteLevelDetokenizer if pieces.rules.byte_level else SentencePieceDetokenizer
    return kind(pieces, skip_special_tokens=skip_special_tokens)
