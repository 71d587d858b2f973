"""A network that misbehaves by a seed: late streams, lost, doubled and late datagrams, cut pairs, failing copies."""

from __future__ import annotations

import random

import msgspec

from simulator.event_heap import EventHeap


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """How bad it is. Shares are probabilities of one message."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_us_max: int = 200_000
    stream_us_max: int = 5_000
    replayed: float = 0.0
    """Token messages that a reconnect delivers again."""
    copy_failed: float = 0.0
    """Moves of which only a part arrives."""


class StormyWeather:
    """Implements `simulator.network.Weather`; `calm()` ends it for good."""

    def __init__(self, storm: Storm, source: random.Random, heap: EventHeap) -> None:
        self._heap = heap
        self._storm = storm
        self._random = source
        self._cut: dict[frozenset[str], int] = {}

    def calm(self) -> None:
        self._storm = Storm(stream_us_max=100)
        self._cut.clear()

    def cut(self, left: str, right: str, until_us: int) -> None:
        """Nothing passes between the two until then: datagrams are lost, streams wait."""
        self._cut[frozenset((left, right))] = until_us

    def stream_delay_us(self, source: str, target: str) -> int:
        held_us = max(0, self._cut.get(frozenset((source, target)), 0) - self._heap.now_us)
        return held_us + self._random.randrange(self._storm.stream_us_max)

    def datagram_delays_us(self, source: str, target: str) -> list[int]:
        if self._cut.get(frozenset((source, target)), 0) > self._heap.now_us or self._happens(self._storm.lost):
            return []
        copies = 2 if self._happens(self._storm.doubled) else 1
        return [self._random.randrange(self._storm.late_us_max) if self._happens(self._storm.late) else 0] * copies

    def replays(self) -> bool:
        return self._happens(self._storm.replayed)

    def pages_arriving(self, pages: int) -> int:
        return self._random.randrange(pages) if self._happens(self._storm.copy_failed) else pages

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._random.random() < share
