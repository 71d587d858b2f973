"""Control channel of hand-offs over ZeroMQ: a ROUTER at the decode instance, one DEALER at P for each D.

One ZeroMQ message is one msgpack record (`segue.handoff_messages`), and a DEALER's routing id is the incarnation that
speaks, so a source cannot be forged by accident and an answer reaches exactly the process that asked. Everything is
best effort: a full queue or an unknown peer drops the message and counts it; the cores repeat what matters.

A connection that breaks is made anew without a word, and what was on its way is lost. A DEALER's monitor shows it: each
handshake after the first is told to `on_restored`.

ZeroMQ's file descriptor is edge-triggered, and sending may consume the edge of a waiting message. So every wake-up
drains until nothing is left, and every send schedules one more look.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import zmq

from segue.errors import SegueError
from segue.handoff_messages import (
    ControlMessage,
    HeardMessage,
    MalformedMessage,
    decode_message,
    encode_message,
)
from segue.ids import InstanceRef

QUEUED_MESSAGES_MAX = 10_000
"""Per peer: a second of messages at ten times the highest rate seen."""

MESSAGE_BYTES_MAX = 8 << 20
"""The largest is a grant: 1M tokens of 16-token blocks are 65,536 page numbers."""

RECONNECT_MS = 50
RECONNECT_MS_MAX = 1000

OnMessage = Callable[[HeardMessage], None]
OnRestored = Callable[[InstanceRef], None]


def routing_id(ref: InstanceRef) -> bytes:
    return f"{ref.uuid}/{ref.incarnation}".encode()


class UnreachableAddress(SegueError):
    """Not an address, or one of a transport that is not here."""


class ControlChannel:
    """All control sockets of one instance. Belongs to the asyncio loop that calls `start`."""

    def __init__(self, ref: InstanceRef, on_message: OnMessage, on_restored: OnRestored = lambda peer: None) -> None:
        self._ref = ref
        self._on_message = on_message
        self._on_restored = on_restored
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[InstanceRef, zmq.Socket[bytes]] = {}
        self._monitors: dict[InstanceRef, zmq.Socket[bytes]] = {}
        self._connected: set[InstanceRef] = set()
        """Peers dialled that have answered once."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dropped: Counter[str] = Counter()
        """Messages not sent or not understood, by reason."""

    def listen(self, address: str) -> str:
        """Bind the ROUTER to `ipc://path` or `tcp://host:*`; returns the address to dial."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(address)
        self._router = socket
        self._watch(socket)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def dial(self, peer: InstanceRef, address: str) -> None:
        """Connect to a peer's ROUTER; ZeroMQ reconnects by itself. Idempotent. Raises UnreachableAddress for an address
        that could never be connected to."""
        if peer in self._dealers:
            return
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id(self._ref))
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UnreachableAddress(f"{address!r}: {error.strerror}") from error
        self._dealers[peer] = socket
        self._watch(socket)
        monitor = self._monitors[peer] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._look_at(monitor, self._note_connections, peer, monitor)

    def hang_up(self, peer: InstanceRef) -> None:
        socket = self._dealers.pop(peer, None)
        if socket is not None:
            monitor = self._monitors.pop(peer)
            self._connected.discard(peer)
            socket.disable_monitor()
            self._unwatch(monitor)
            self._unwatch(socket)

    def send(self, message: ControlMessage, peer: InstanceRef) -> bool:
        """Queue one message; False (and counted) when it was dropped."""
        raw = encode_message(message)
        dealer = self._dealers.get(peer)
        try:
            if dealer is not None:
                dealer.send(raw, zmq.NOBLOCK)
                self._look_again(dealer)
            elif self._router is not None:
                self._router.send_multipart([routing_id(peer), raw], zmq.NOBLOCK)
                self._look_again(self._router)
            else:
                self.dropped["no channel"] += 1
                return False
        except zmq.Again:
            self.dropped["queue full"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped["unreachable"] += 1
            return False
        return True

    def close(self) -> None:
        """Send what is queued for at most a tenth of a second, then close."""
        for peer in list(self._dealers):
            self.hang_up(peer)
        if self._router is not None:
            self._unwatch(self._router)
            self._router = None
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 100)
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._look_at(socket, self._drain, socket)

    def _look_at(self, socket: zmq.Socket[bytes], look: Callable[..., None], *arguments: object) -> None:
        """Now, and whenever something has come."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), look, *arguments)
        self._loop.call_soon(look, *arguments)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.remove_reader(socket.fileno())
        socket.close()

    def _look_again(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._drain, socket)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while not socket.closed and socket.poll(0, zmq.POLLIN):
            self._receive(socket.recv_multipart(zmq.NOBLOCK))

    def _note_connections(self, peer: InstanceRef, monitor: zmq.Socket[bytes]) -> None:
        while not monitor.closed and monitor.poll(0, zmq.POLLIN):
            monitor.recv_multipart(zmq.NOBLOCK)
            if peer in self._connected:
                self._on_restored(peer)
            self._connected.add(peer)

    def _receive(self, frames: list[bytes]) -> None:
        """One message: [routing id, record] at a ROUTER, [record] at a DEALER."""
        try:
            message = decode_message(frames[-1])
        except MalformedMessage:
            self.dropped["malformed"] += 1
            return
        if len(frames) > 2 or (len(frames) == 2 and frames[0] != routing_id(message.source)):
            self.dropped["forged source"] += 1
            return
        self._on_message(message)
