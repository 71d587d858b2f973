"""The target's side of one page connection: what may be written, and what is answered. No I/O.

States: greeting expected -> between ops <-> in an op. An op is counted up to its first page that was not lent, came
corrupt, or was taken back meanwhile; later pages of it are read, written if they are lent, and not counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.connectors.page_loans import PageLoans
from kvstore.connectors.tcp_frames import (
    Frame,
    FrameReader,
    Greeting,
    Kind,
    PageEnded,
    ProtocolError,
    attempt_of,
    control_frame,
    greeting_of,
    session_seed,
)
from segue.ids import AttemptRef, InstanceRef

ANSWERS_BYTES_MAX = 64 << 10
"""Answers that a source does not read: it is broken, and is hung up on."""


class _Op:
    def __init__(self, number: int, attempt: AttemptRef) -> None:
        self.number = number
        self.attempt = attempt
        self.pages = 0
        self.valid = 0
        self.reason = ""


class ReceivingSession:
    """`pages` is the pool, `[pages * page_bytes]` bytes. `refusal_of` says why a greeting is not welcome, or ""."""

    def __init__(
        self, pages: memoryview, page_bytes: int, loans: PageLoans, refusal_of: Callable[[Greeting], str]
    ) -> None:
        self._pages = pages
        self._page_bytes = page_bytes
        self._loans = loans
        self._refusal_of = refusal_of
        self._reader = FrameReader(page_bytes, self._place)
        self._op: _Op | None = None
        self.source: InstanceRef | None = None
        """Set by a welcome greeting."""
        self.refusal = ""
        """Set by an unwelcome one: hang up once `answers` have left."""
        self.answers = bytearray()
        self._has_received = False

    def buffers(self) -> list[memoryview]:
        """Only inside `loans.writing()`, together with the read into them."""
        return self._reader.buffers()

    def filled(self, count: int) -> None:
        """Raises ProtocolError: hang up."""
        self._has_received = True
        for read in self._reader.filled(count):
            if isinstance(read, PageEnded):
                self._page_ended(read)
            else:
                self._take(read)
        if len(self.answers) > ANSWERS_BYTES_MAX:
            raise ProtocolError("answers are not read")

    def tell_progress(self) -> None:
        """To be called now and then: says ALIVE if anything came since and an op is under way."""
        if self._has_received and self._op is not None:
            self.answers += control_frame(Kind.ALIVE, self._reader.seed)
        self._has_received = False

    def _place(self, op: int, page: int) -> memoryview | None:
        if self.source is None or self._op is None or op != self._op.number:
            return None
        if not self._loans.is_writable(self.source, self._op.attempt, page):
            return None
        return self._pages[page * self._page_bytes : (page + 1) * self._page_bytes]

    def _take(self, frame: Frame) -> None:
        kind = frame.header.kind
        if self.source is None:
            self._greeted(frame)
        elif kind is Kind.BEGIN and self._op is None:
            self._op = _Op(frame.header.op, attempt_of(frame))
        elif self._op is None or frame.header.op != self._op.number:
            raise ProtocolError("frame outside an op")
        elif kind is Kind.END:
            self._op_ended(self._op, frame)
        else:
            raise ProtocolError("frame out of order")

    def _greeted(self, frame: Frame) -> None:
        if frame.header.kind is not Kind.GREET:
            raise ProtocolError("greeting expected")
        greeting = greeting_of(frame)
        self.refusal = self._refusal_of(greeting)
        if self.refusal:
            self.answers += control_frame(Kind.REFUSED, 0, payload=self.refusal.encode())
            return
        self.source = greeting.source
        self._reader.seed = session_seed(greeting)
        # Not sealed for the session yet: that the number is right says that both mean the same one.
        self.answers += control_frame(Kind.WELCOME, 0, number=self._reader.seed)

    def _page_ended(self, ended: PageEnded) -> None:
        op = self._op
        if self.source is None or op is None or ended.op != op.number:
            raise ProtocolError("page outside an op")
        if self._loans.landed(self.source, op.attempt, ended.page, ended.digest, ended.intact):
            op.valid += op.valid == op.pages
        elif not op.reason:
            lent = self._loans.is_lent(self.source, op.attempt, ended.page)
            op.reason = f"page {ended.page} came corrupt" if lent else f"page {ended.page} is not lent"
        op.pages += 1

    def _op_ended(self, op: _Op, frame: Frame) -> None:
        if frame.header.number != op.pages:
            raise ProtocolError("pages of an op")
        seed, reason = self._reader.seed, op.reason.encode()
        self.answers += control_frame(Kind.DONE, seed, op=op.number, number=op.valid, payload=reason)
        self._op = None
