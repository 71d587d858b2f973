"""What each token id stands for in bytes, read from a tokenizer's `decoder` so that streaming needs no re-decoding.

Two families cover the models of today, and both are reproduced exactly (the tests compare with the tokenizer's own
`decode`):

    byte level       every token is a run of bytes; text is the lossy UTF-8 decode of all bytes together
    sentence piece   tokens are strings in which U+2581 stands for a space; `<0xNN>` tokens are single bytes, and a run
                     of them is one UTF-8 string, or one replacement character *per byte* when it is not valid

Any other decoder is a ConfigError: text that differs from the model's own would be worse than none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from segue.errors import ConfigError


class DecoderRules(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence-piece decoder in its order: `replaces` per token, byte runs, then leading `strip_content` goes."""

    byte_level: bool
    replaces: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_content: str = ""
    strip_count: int = 0


class Piece(msgspec.Struct, frozen=True):
    """`text` is None for a token that may be part of a byte sequence: then `data` alone counts."""

    data: bytes
    text: str | None
    special: bool


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE (Radford et al. 2019): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    missing = (byte for byte in range(256) if byte not in alphabet.values())
    alphabet.update({chr(0x100 + offset): byte for offset, byte in enumerate(missing)})
    return alphabet


BYTE_OF_CHARACTER = _byte_alphabet()


def decoder_rules(tokenizer_json: str) -> DecoderRules:
    """Read the `decoder` section of a `tokenizer.json`; raise ConfigError for one that is not known."""
    decoder = msgspec.json.decode(tokenizer_json).get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        return DecoderRules(byte_level=True)
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return DecoderRules(byte_level=True)
    return _sequence_rules(steps)


def _sequence_rules(steps: list[dict[str, Any]]) -> DecoderRules:
    found: dict[str, Any] = {"replaces": ()}
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                found["replaces"] += ((old, new),)
            case {"type": "ByteFallback"} if not fused:
                found["byte_fallback"] = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if fused:
                found.update(strip_content=content, strip_count=start)
            case _:
                raise ConfigError(f"tokenizer: decoder step {step.get('type')!r} is not supported at this place")
    if not fused:
        raise ConfigError("tokenizer: only ByteLevel decoders and sequences with a Fuse step are supported")
    return DecoderRules(byte_level=False, **found)


class TokenPieces:
    """Pieces by token id, made on first use. Ids the tokenizer does not know have none, as in its own `decode`."""

    def __init__(self, tokenizer: Tokenizer, rules: DecoderRules) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._known: dict[int, Piece | None] = {}

    def __getitem__(self, token_id: int) -> Piece | None:
        try:
            return self._known[token_id]
        except KeyError:
            piece = self._known[token_id] = self._make(token_id)
            return piece

    def _make(self, token_id: int) -> Piece | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        special = token in self._special
        if self.rules.byte_level:
            data = _byte_level_data(token)
            return Piece(data, _whole_text(data), special)
        for old, new in self.rules.replaces:
            token = token.replace(old, new)
        byte = _fallback_byte(token) if self.rules.byte_fallback else None
        if byte is not None:
            return Piece(bytes([byte]), None, special)
        return Piece(token.encode(), token, special)


def _byte_level_data(token: str) -> bytes:
    """Added tokens may hold characters outside of the alphabet: they stand for themselves, as a whole."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _whole_text(data: bytes) -> str | None:
    """What the bytes say by themselves, if no character of them is cut."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
