"""Page connections over real sockets: each drives one session and never blocks. All of it runs in the socket loop."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from kvstore.connectors.base import MoveDone
from kvstore.connectors.page_loans import PageLoans
from kvstore.connectors.socket_loop import SocketLoop
from kvstore.connectors.tcp_frames import ProtocolError
from kvstore.connectors.tcp_receiving import ReceivingSession
from kvstore.connectors.tcp_sending import SendingSession, SendOp

READS_PER_TURN = 8
"""Pieces read of one connection before the others get their turn: at most 8 MiB."""

KEEPALIVE_IDLE_S = 5
KEEPALIVE_EVERY_S = 2
KEEPALIVE_PROBES = 3
"""A host that vanished is noticed within 11 s on a silent connection; on a busy one by TCP_USER_TIMEOUT."""


def prepare(sock: socket.socket, stall_s: float) -> None:
    """Buffer sizes are left alone: setting one turns the kernel's own tuning off."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))


class IncomingConnection:
    """A source that writes here. `on_end` is called once, with the reason."""

    def __init__(
        self,
        sock: socket.socket,
        loop: SocketLoop,
        session: ReceivingSession,
        loans: PageLoans,
        on_end: Callable[[IncomingConnection, str], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._loans = loans
        self._on_end = on_end
        self.session = session
        self.opened_s = time.monotonic()
        self._is_open = True
        loop.watch(sock, selectors.EVENT_READ, self._on_ready)

    def close(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._on_end(self, reason)

    def tell_progress(self) -> None:
        self.session.tell_progress()
        if self.session.answers:
            self._on_ready(0)

    def _on_ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._read()
            self._answer()
        except BlockingIOError:
            self._watch()
        except ProtocolError as error:
            self.close(str(error))
        except OSError as error:
            self.close(f"connection: {error.strerror}")

    def _read(self) -> None:
        for _ in range(READS_PER_TURN):
            with self._loans.writing():
                try:
                    count = self._sock.recvmsg_into(self.session.buffers())[0]
                except BlockingIOError:
                    return
            if count == 0:
                raise ProtocolError("connection: closed by the peer")
            self.session.filled(count)

    def _answer(self) -> None:
        answers = self.session.answers
        if answers:
            del answers[: self._sock.send(answers)]
        if self.session.refusal and not answers:
            raise ProtocolError(f"refused: {self.session.refusal}")
        self._watch()

    def _watch(self) -> None:
        wanted = selectors.EVENT_WRITE if self.session.answers else 0
        self._loop.watch(self._sock, selectors.EVENT_READ | wanted, self._on_ready)


class OutgoingConnection:
    """Pages to one target. Ends by itself when it makes no progress for `stall_s` while something is to be done."""

    def __init__(
        self,
        address: tuple[str, int],
        loop: SocketLoop,
        session: SendingSession,
        stall_s: float,
        on_done: Callable[[list[MoveDone]], None],
        on_end: Callable[[OutgoingConnection, str], None],
    ) -> None:
        self._loop = loop
        self._on_done = on_done
        self._on_end = on_end
        self._stall_s = stall_s
        self.session = session
        self._progress_s = time.monotonic()
        self._is_open = True
        self._sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        prepare(self._sock, stall_s)
        self._sock.connect_ex(address)  # an error shows as readiness, with the reason
        loop.watch(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_ready)

    def add(self, op: SendOp) -> None:
        if self.session.is_idle:
            self._progress_s = time.monotonic()
        self.session.add(op)
        self._write_soon()

    def cancel(self, op: int) -> None:
        self._on_done(self.session.cancel(op))

    def check_progress(self, now_s: float) -> None:
        if not self.session.is_idle and now_s - self._progress_s > self._stall_s:
            self.close("no progress")

    def close(self, reason: str) -> None:
        """Every op of it ends now."""
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._on_done(self.session.fail(reason))
            self._on_end(self, reason)

    def _on_ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._read()
            if mask & selectors.EVENT_WRITE:
                self._write()
        except ProtocolError as error:
            self.close(str(error))
        except OSError as error:
            self.close(f"connection: {error.strerror}")

    def _read(self) -> None:
        while True:
            try:
                count = self._sock.recvmsg_into(self.session.buffers())[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ProtocolError("connection: closed by the peer")
            self._progress_s = time.monotonic()
            was_welcome = self.session.is_welcome
            self._on_done(self.session.filled(count))
            if self.session.is_welcome and not was_welcome:
                self._write_soon()

    def _write(self) -> None:
        pieces = self.session.pieces()
        if not pieces:
            self._loop.watch(self._sock, selectors.EVENT_READ, self._on_ready)
            return
        try:
            self.session.sent(self._sock.sendmsg(pieces))
        except BlockingIOError:
            return
        self._progress_s = time.monotonic()

    def _write_soon(self) -> None:
        self._loop.watch(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_ready)
