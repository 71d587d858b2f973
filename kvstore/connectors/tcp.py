"""Pages between two hosts over TCP: from the source's pool into the target's, without a copy of ours in between.

One thread of the instance does all of it, with sockets that never block; the loop that decides only posts work. Nothing
is staged: the kernel reads from the source's pages and writes into the target's. Every page carries a digest; one that
comes corrupt, or is not lent to just this attempt of just this incarnation, is not counted (`tcp_receiving`).

Who may write is the target's own table (`page_loans`), asked before each piece that the kernel is given. So taking
pages back is itself the proof that nothing lands any more, whatever the source does and whatever is still on its way:
`fence` is always true, also against a source that is silent, mad, or behind a broken network.

A connection that breaks ends the ops on it as failed. The next op dials again; the target keeps what it has lent.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.page_loans import PageLoans
from kvstore.connectors.socket_loop import SocketLoop
from kvstore.connectors.tcp_connections import IncomingConnection, OutgoingConnection, prepare
from kvstore.connectors.tcp_frames import Greeting
from kvstore.connectors.tcp_receiving import ReceivingSession
from kvstore.connectors.tcp_sending import SendingSession, SendOp
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity, SegmentDescriptor
from segue.ids import AttemptRef, InstanceRef
from segue.limits import INSTANCES_MAX

NONCE_BYTES = 32

STALL_S = 4.0
"""Without a byte sent or answered for so long a connection counts as broken: under half of the default lease, so that
an attempt whose transfer hangs is finished by its target before anybody's lease runs out."""

PROBE_S = 3.0
"""For connecting and being welcomed."""

GREETING_S = 5.0
STRANGERS_MAX = 64
"""Connections that have not greeted yet; more are hung up on."""

CONNECTIONS_MAX = INSTANCES_MAX + STRANGERS_MAX


class _Target:
    """A peer that this side writes to. `connection` belongs to the socket loop."""

    def __init__(self, address: tuple[str, int], greeting: Greeting, pages: int) -> None:
        self.address = address
        self.greeting = greeting
        self.pages = pages
        self.connection: OutgoingConnection | None = None


class TcpMover:
    """`pages` is this instance's pool. With `listen_host` it is a target, else a source only."""

    def __init__(
        self,
        ref: InstanceRef,
        pages: memoryview,
        page_bytes: int,
        *,
        listen_host: str | None = None,
        stall_s: float = STALL_S,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError when `listen_host` is no address of this machine."""
        self._ref = ref
        self._pages = pages
        self._page_bytes = page_bytes
        self._stall_s = stall_s
        self._on_done = on_done
        self._loans = PageLoans()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._sources: set[InstanceRef] = set()
        self._greeted: set[InstanceRef] = set()
        self._targets: dict[InstanceRef, _Target] = {}
        self._incoming: list[IncomingConnection] = []
        self._done: deque[MoveDone] = deque()
        self.ended: Counter[str] = Counter()
        """Connections that have ended, by reason."""
        self._listener = None if listen_host is None else _listen(listen_host)
        self._loop = SocketLoop("page-sockets", self._on_tick)
        if self._listener is not None:
            self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    # -- for the loop that decides

    def describe(self) -> list[SegmentDescriptor]:
        if self._listener is None:
            return []
        host, port = self._listener.getsockname()[:2]
        pages = len(self._pages) // self._page_bytes
        return [SegmentDescriptor("tcp", f"{host}:{port}", pages, self._page_bytes, 0, self._nonce)]

    def register(self, peer: InstanceRef, process: ProcessIdentity, offers: Sequence[SegmentDescriptor]) -> None:
        """With an offer of TCP: connect and be welcomed, within PROBE_S."""
        offer = next((offer for offer in offers if offer.mover == "tcp"), None)
        if offer is not None:
            self._probe(peer, offer)
        elif offers:
            raise MoverError("the peer does not listen for pages over TCP")
        self._sources.add(peer)

    def send(self, op: int, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        send_op = SendOp(op, attempt, pages)
        self._loop.call(lambda: self._start(peer, send_op))

    def receive(self, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        if not pages:
            self._loans.take_back(peer, attempt)
        elif peer not in self._sources:
            raise MoverError(f"{peer} was never registered")
        else:
            self._loans.lend(peer, attempt, pages)

    def poll(self) -> list[MoveDone]:
        finished = []
        while self._done:
            finished.append(self._done.popleft())
        return finished

    def cancel(self, op: int) -> None:
        self._loop.call(lambda: self._cancel(op))

    def fence(self, peer: InstanceRef, attempt: AttemptRef | None = None) -> bool:
        self._loans.take_back(peer, attempt)
        if attempt is None:
            self._loop.call(lambda: self._hang_up(peer, "fenced"))
        return True

    def forget(self, peer: InstanceRef) -> None:
        self._sources.discard(peer)
        self._greeted.discard(peer)
        self._loans.take_back(peer)
        target = self._targets.pop(peer, None)
        self._loop.call(lambda: self._drop(peer, target))

    def has_greeted(self, peer: InstanceRef) -> bool:
        """Whether this peer has ever opened a page connection, and so has chosen TCP."""
        return peer in self._greeted

    def close(self) -> None:
        self._loop.stop(self._close)

    # -- in the socket loop: sending

    def _probe(self, peer: InstanceRef, offer: SegmentDescriptor) -> None:
        """Raises MoverError when the peer cannot be reached, or is not who made the offer."""
        if offer.page_bytes != self._page_bytes:
            raise MoverError(f"pages of {offer.page_bytes} bytes do not fit {self._page_bytes}")
        greeting = Greeting(self._ref, peer, self._page_bytes, offer.nonce)
        target = _Target(_address(offer.location), greeting, offer.pages)
        answered = threading.Event()
        reasons: list[str] = []

        def on_answer(reason: str) -> None:
            if reason:
                reasons.append(reason)
            answered.set()

        self._loop.call(lambda: self._connect(target, on_answer))
        if not answered.wait(PROBE_S):
            reasons.append("no answer")
        if reasons:
            self._loop.call(lambda: self._drop(None, target))
            raise MoverError(f"{offer.location} cannot be used for pages: {reasons[0]}")
        former = self._targets.get(peer)
        self._targets[peer] = target
        self._loop.call(lambda: self._drop(None, former))

    def _connect(self, target: _Target, on_answer: Callable[[str], None] = lambda reason: None) -> OutgoingConnection:
        session = SendingSession(target.greeting, self._pages, on_welcome=lambda: on_answer(""))

        def ended(connection: OutgoingConnection, reason: str) -> None:
            self.ended[reason] += 1
            if target.connection is connection:
                target.connection = None
            on_answer(reason)

        connection = OutgoingConnection(target.address, self._loop, session, self._stall_s, self._finish, ended)
        target.connection = connection
        return connection

    def _start(self, peer: InstanceRef, op: SendOp) -> None:
        target = self._targets.get(peer)
        if target is None:
            self._finish([MoveDone(op.op, 0, f"{peer} is not registered")])
            return
        own = len(self._pages) // self._page_bytes
        if any(not (0 <= source < own and 0 <= to < target.pages) for source, to in op.pages):
            self._finish([MoveDone(op.op, 0, "page number out of range")])
            return
        (target.connection or self._connect(target)).add(op)

    def _cancel(self, op: int) -> None:
        for target in list(self._targets.values()):
            if target.connection is not None:
                target.connection.cancel(op)

    def _finish(self, done: list[MoveDone]) -> None:
        if done:
            self._done.extend(done)
            self._on_done()

    def _drop(self, peer: InstanceRef | None, target: _Target | None) -> None:
        if target is not None and target.connection is not None:
            target.connection.close("forgotten")
        if peer is not None:
            self._hang_up(peer, "forgotten")

    # -- in the socket loop: receiving

    def _accept(self, mask: int) -> None:
        assert self._listener is not None
        sock, _ = self._listener.accept()
        strangers = sum(connection.session.source is None for connection in self._incoming)
        if strangers >= STRANGERS_MAX or len(self._incoming) >= CONNECTIONS_MAX:
            self.ended["too many connections"] += 1
            sock.close()
            return
        prepare(sock, self._stall_s)
        session = ReceivingSession(self._pages, self._page_bytes, self._loans, self._refusal_of)
        self._incoming.append(IncomingConnection(sock, self._loop, session, self._loans, self._incoming_ended))

    def _refusal_of(self, greeting: Greeting) -> str:
        if greeting.target != self._ref:
            return "another incarnation lives here"
        if not secrets.compare_digest(greeting.nonce, self._nonce):
            return "the nonce differs"
        if greeting.source not in self._sources:
            return "source was never registered"
        if greeting.page_bytes != self._page_bytes:
            return "page size differs"
        self._hang_up(greeting.source, "dialled again")
        self._greeted.add(greeting.source)
        return ""

    def _hang_up(self, source: InstanceRef, reason: str) -> None:
        for connection in [each for each in self._incoming if each.session.source == source]:
            connection.close(reason)

    def _incoming_ended(self, connection: IncomingConnection, reason: str) -> None:
        self.ended[reason] += 1
        self._incoming.remove(connection)

    def _on_tick(self, now_s: float) -> None:
        for target in list(self._targets.values()):
            if target.connection is not None:
                target.connection.check_progress(now_s)
        for connection in list(self._incoming):
            if connection.session.source is None and now_s - connection.opened_s > GREETING_S:
                connection.close("no greeting")
            else:
                connection.tell_progress()

    def _close(self) -> None:
        if self._listener is not None:
            self._loop.unwatch(self._listener)
            self._listener.close()
        for connection in list(self._incoming):
            connection.close("closing")
        for target in list(self._targets.values()):
            if target.connection is not None:
                target.connection.close("closing")


def _listen(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"page connections on {host}: {error.strerror}") from error
    try:
        listener.bind(address)
        listener.listen(STRANGERS_MAX)
    except OSError as error:
        listener.close()
        raise ConfigError(f"page connections on {host}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _address(location: str) -> tuple[str, int]:
    host, _, port = location.rpartition(":")
    if not host or not port.isdecimal():
        raise MoverError(f"malformed address {location!r}")
    return host, int(port)
