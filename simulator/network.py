"""Small messages. Streams (gRPC) arrive in order or not at all; datagrams (ZeroMQ) may be lost, doubled or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from simulator.event_heap import EventHeap, Rank

Deliver = Callable[[], None]

STREAM_US = 300
"""One way over a gRPC stream in one data centre."""

DATAGRAM_US = 100


class Weather(Protocol):
    """What the network does to one message."""

    def stream_delay_us(self, source: str, target: str) -> int:
        """Beyond the usual latency."""

    def datagram_delays_us(self, source: str, target: str) -> list[int]:
        """One entry for each copy that arrives; none: lost."""

    def replays(self) -> bool:
        """Whether a stream breaks here and its reconnect says the message again."""

    def pages_arriving(self, pages: int) -> int:
        """How many pages of a bulk copy arrive, from the first one on."""


class Calm:
    """Nothing is lost, and nothing late."""

    def stream_delay_us(self, source: str, target: str) -> int:
        return 0

    def datagram_delays_us(self, source: str, target: str) -> list[int]:
        return [0]

    def replays(self) -> bool:
        return False

    def pages_arriving(self, pages: int) -> int:
        return pages


class Network:
    def __init__(self, heap: EventHeap, weather: Weather) -> None:
        self.weather = weather
        self._heap = heap
        self._stream_free_us: dict[tuple[str, str], int] = {}
        self.sent = 0

    def stream(self, source: str, target: str, deliver: Deliver) -> None:
        """In order with everything sent before from `source` to `target`."""
        self.sent += 1
        at_us = self._heap.now_us + STREAM_US + self.weather.stream_delay_us(source, target)
        at_us = max(at_us, self._stream_free_us.get((source, target), 0))
        self._stream_free_us[source, target] = at_us
        self._heap.push(at_us, Rank.NETWORK, deliver)

    def datagram(self, source: str, target: str, deliver: Deliver, *, extra_us: int = 0) -> None:
        self.sent += 1
        for delay_us in self.weather.datagram_delays_us(source, target):
            self._heap.push(self._heap.now_us + DATAGRAM_US + extra_us + delay_us, Rank.NETWORK, deliver)
