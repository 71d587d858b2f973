"""Recordings of what a core was told and decided: the means to replay a live incident in a test.

One record is a little-endian u32 length and that many bytes of msgpack: first the settings of the core, then its
steps, (now_us, events, decisions). A Conductor that was started again appends to the same file, settings first. Token
ids never reach the core, so a recording holds no text of any user; block hashes it does hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import msgspec

from conductor.core.decisions import Decision
from conductor.core.events import Event
from conductor.core.machine import ConductorCore
from conductor.core.settings import CoreSettings, make_core
from segue.errors import SegueError

_LENGTH = Struct("<I")

FORMAT_VERSION = 1


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A Conductor was started."""

    version: int
    settings: CoreSettings


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    now_us: int
    events: list[Event]
    decisions: list[Decision]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step at which a replay decided otherwise than the recording says."""

    number: int
    """Of the step, counted from 0 over all starts."""
    recorded: Step
    decided: list[Decision]


class TruncatedRecording(SegueError):
    """The file ends inside a record: its writer was killed."""


class UnreadableRecording(SegueError):
    """Not a recording, or one of another version."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Started | Step)


class Recorder:
    """Appends to a file; `close` it."""

    def __init__(self, path: Path, settings: CoreSettings | None = None) -> None:
        self._file: BinaryIO = path.open("ab")
        self._write(_encoder.encode(Started(FORMAT_VERSION, settings or CoreSettings())))

    def record(self, now_us: int, events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        self._write(_encoder.encode(Step(now_us, list(events), list(decisions))))

    def close(self) -> None:
        self._file.close()

    def _write(self, body: bytes) -> None:
        self._file.write(_LENGTH.pack(len(body)) + body)


def read_recording(path: Path) -> Iterator[Started | Step]:
    """Records in order. Raises TruncatedRecording at a torn end, UnreadableRecording on foreign content."""
    with path.open("rb") as file:
        while header := file.read(_LENGTH.size):
            if len(header) < _LENGTH.size:
                raise TruncatedRecording(f"{path}: ends inside a length")
            (length,) = _LENGTH.unpack(header)
            body = file.read(length)
            if len(body) < length:
                raise TruncatedRecording(f"{path}: ends inside a record")
            try:
                record = _decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise UnreadableRecording(f"{path}: {error}") from error
            if isinstance(record, Started) and record.version != FORMAT_VERSION:
                raise UnreadableRecording(f"{path}: format {record.version}, this version reads {FORMAT_VERSION}")
            yield record


def first_difference(records: Iterable[Started | Step]) -> Difference | None:
    """Tell fresh cores what was recorded; None when they decide the same, step by step."""
    core: ConductorCore | None = None
    number = 0
    for record in records:
        if isinstance(record, Started):
            core = make_core(record.settings)
            continue
        if core is None:
            raise UnreadableRecording("a recording begins with the settings of its Conductor")
        decided = core.step(record.now_us, record.events)
        if decided != record.decisions:
            return Difference(number=number, recorded=record, decided=decided)
        number += 1
    return None
