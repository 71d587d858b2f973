"""KV events and load reports over ZeroMQ: one PUB socket for each instance, one SUB socket for each Conductor.

PUB drops messages for a slow or late subscriber; sequence numbers make every drop visible (`SequenceTracker`), and the
reader then asks over its control stream for a replay, which reaches it through this same socket: one message is one
msgpack record, tagged "kv" or "load".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvstore.events import EventLog
from segue.errors import SegueError
from segue.ids import InstanceRef
from segue.kv_events import KvEvent, LoadReport, PublishedMessage

QUEUED_MESSAGES_MAX = 10_000
"""Per subscriber: at 10 messages a second and instance this is minutes; past it a reader is lost anyway and resyncs."""

_decoder = msgspec.msgpack.Decoder(PublishedMessage)
_encoder = msgspec.msgpack.Encoder()


class MalformedEvent(SegueError):
    """A publisher sent bytes that are no message of this version."""


def decode_published(raw: bytes) -> PublishedMessage:
    """Raises MalformedEvent."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise MalformedEvent(str(error)) from error


class EventPublisher:
    """Publishes for one instance. Not thread-safe: it belongs to the I/O loop.

    `snapshot` returns BlocksCleared and the events that rebuild what the instance holds (`BlockPool.snapshot_events`).
    `address` after `bind` names the actual port of a wildcard bind.
    """

    def __init__(self, ref: InstanceRef, snapshot: Callable[[], Sequence[KvEvent]]) -> None:
        self._log = EventLog(ref)
        self._snapshot = snapshot
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = ""

    def bind(self, address: str) -> str:
        """`tcp://host:*` or `ipc://path`; returns the address to connect to."""
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.address

    @property
    def next_sequence(self) -> int:
        return self._log.sequence + 1

    def publish_kv(self, events: Sequence[KvEvent]) -> None:
        for batch in self._log.batches(events):
            self._send(batch)

    def publish_load(self, report: LoadReport) -> None:
        """`report.sequence` must be `next_sequence`."""
        self._send(self._log.numbered(report))

    def resync(self, sequence_seen: int) -> None:
        """Say again what follows `sequence_seen`; 0, or more than is kept, gets a snapshot."""
        missed = self._log.after(sequence_seen)
        if missed is None:
            missed = list(self._log.batches(self._snapshot(), snapshot=True))
        for message in missed:
            self._send(message)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _send(self, message: PublishedMessage) -> None:
        self._socket.send(_encoder.encode(message))


class UnreachableEvents(SegueError):
    """Not an address, or one of a transport that is not here."""


class EventSubscriber:
    """Reads the publishers of many instances: `add(address)`, then `async for message in subscriber`.

    Malformed messages are counted in `malformed` and skipped: one bad publisher must not end the others' events.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._addresses: dict[str, int] = {}
        self.malformed = 0

    def add(self, address: str) -> None:
        """Connect; adding an address twice connects once and needs two removals. Raises UnreachableEvents."""
        count = self._addresses.get(address, 0)
        if count == 0:
            try:
                self._socket.connect(address)
            except zmq.ZMQError as error:
                raise UnreachableEvents(f"events_address {address!r}: {error.strerror}") from error
        self._addresses[address] = count + 1

    def remove(self, address: str) -> None:
        """Unknown addresses are ignored: an instance may be lost twice."""
        count = self._addresses.get(address, 0)
        if count == 0:
            return
        if count == 1:
            del self._addresses[address]
            self._socket.disconnect(address)
        else:
            self._addresses[address] = count - 1

    async def receive(self) -> PublishedMessage:
        """The next well-formed message."""
        while True:
            frames: list[Any] = await self._socket.recv_multipart()
            try:
                return decode_published(b"".join(frames))
            except MalformedEvent:
                self.malformed += 1

    async def __aiter__(self) -> AsyncIterator[PublishedMessage]:
        while True:
            yield await self.receive()

    def close(self) -> None:
        self._socket.close()
        self._context.term()
