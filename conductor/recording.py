"""Recordings of what a core was told and decided: the means to replay a live incident in a test.

One record is a little-endian u32 length and that many bytes of msgpack: (now_us, events, decisions). Token ids never
reach the core, so a recording holds no text of any user; block hashes it does hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import msgspec

from conductor.core.decisions import Decision
from conductor.core.events import Event
from segue.errors import SegueError

_LENGTH = Struct("<I")


class Step(msgspec.Struct, frozen=True, array_like=True):
    now_us: int
    events: list[Event]
    decisions: list[Decision]


class TruncatedRecording(SegueError):
    """The file ends inside a record: its writer was killed."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Step)


class Recorder:
    """Appends steps to a file; `close` it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")

    def record(self, now_us: int, events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        body = _encoder.encode((now_us, events, decisions))
        self._file.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._file.close()


def read_recording(path: Path) -> Iterator[Step]:
    """Steps in order. Raises TruncatedRecording at a torn end, msgspec.ValidationError on foreign content."""
    with path.open("rb") as file:
        while header := file.read(_LENGTH.size):
            if len(header) < _LENGTH.size:
                raise TruncatedRecording(f"{path}: ends inside a length")
            (length,) = _LENGTH.unpack(header)
            body = file.read(length)
            if len(body) < length:
                raise TruncatedRecording(f"{path}: ends inside a record")
            yield _decoder.decode(body)
