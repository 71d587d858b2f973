"""Recordings of a live loop: what a core heard and decided, so that it can be replayed and compared.

A file of length-prefixed (u32, little-endian) msgpack arrays [now_us, events, decisions].
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from worker_runtime.events import Decision, Event, WorkerCore


class RecordedStep(msgspec.Struct, frozen=True, array_like=True):
    now_us: int
    events: list[Event]
    decisions: list[Decision]


class Recorder:
    """Appends steps to a file; closed by its owner."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, now_us: int, events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        raw = self._encoder.encode(RecordedStep(now_us, list(events), list(decisions)))
        self._file.write(struct.pack("<I", len(raw)))
        self._file.write(raw)

    def close(self) -> None:
        self._file.close()


def read_recording(path: Path) -> Iterator[RecordedStep]:
    """Steps in order; a torn last record (the process was killed) ends the recording."""
    decoder = msgspec.msgpack.Decoder(RecordedStep)
    with path.open("rb") as file:
        while len(prefix := file.read(4)) == 4:
            (length,) = struct.unpack("<I", prefix)
            raw = file.read(length)
            if len(raw) < length:
                return
            yield decoder.decode(raw)


def first_difference(steps: Iterator[RecordedStep], core: WorkerCore) -> tuple[int, list[Decision]] | None:
    """Feed a fresh core with a recording; (index of the first step that decides otherwise, what it decided) or None."""
    for index, step in enumerate(steps):
        decisions = core.step(step.now_us, step.events)
        if decisions != step.decisions:
            return index, decisions
    return None
