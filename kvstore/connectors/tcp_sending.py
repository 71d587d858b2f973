"""The source's side of one page connection: ops in order, pages straight from the pool. No I/O.

Ops wait in a queue. Pages are made ready for the kernel, one frame at a time, while less than WINDOW_BYTES are: a
cancel takes effect within that. An op is over when the target says so, or when the connection ends: then nothing of it
is known to have landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvstore.connectors.base import MoveDone
from kvstore.connectors.tcp_frames import (
    Frame,
    FrameReader,
    Greeting,
    Kind,
    PageEnded,
    ProtocolError,
    control_frame,
    pages_frame,
    reason_of,
    run_length,
    session_seed,
)
from segue.ids import AttemptRef

WINDOW_BYTES = 2 << 20
PIECES_MAX = 64
"""Buffers of one sendmsg; the kernel takes up to 1,024."""


class SendOp:
    """Pages still to be sent are those from `begun` on."""

    def __init__(self, op: int, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        self.op = op
        self.attempt = attempt
        self.pages = pages
        self.begun = 0
        self.cancelled = False


class SendingSession:
    """`pages` is the pool, `[pages * page_bytes]` bytes; it is read until the op of a page has ended."""

    def __init__(self, greeting: Greeting, pages: memoryview, on_welcome: Callable[[], None] = lambda: None) -> None:
        self._page_bytes = greeting.page_bytes
        self._pages = pages
        self._seed = session_seed(greeting)
        self._reader = FrameReader(greeting.page_bytes)
        self._queue: deque[SendOp] = deque()
        self._current: SendOp | None = None
        self._answers: deque[SendOp] = deque()
        """Sent whole, not answered yet, in order."""
        hello = control_frame(Kind.GREET, 0, payload=msgspec.msgpack.encode(greeting))
        self._out: deque[memoryview] = deque([memoryview(hello)])
        self._out_bytes = len(hello)
        self._on_welcome = on_welcome
        self.is_welcome = False

    @property
    def is_idle(self) -> bool:
        """Nothing to send and nothing to be answered."""
        return not (self._queue or self._answers or self._out or self._current)

    def add(self, op: SendOp) -> None:
        self._queue.append(op)

    def cancel(self, op: int) -> list[MoveDone]:
        """Ends an op that has not begun; one under way is cut short and answered by the target."""
        for waiting in self._queue:
            if waiting.op == op:
                self._queue.remove(waiting)
                return [MoveDone(op, 0, "cancelled")]
        if self._current is not None and self._current.op == op:
            self._current.cancelled = True
        return []

    def fail(self, reason: str) -> list[MoveDone]:
        """The connection has ended, and every op with it."""
        current = [] if self._current is None else [self._current]
        failed = [*self._answers, *current, *self._queue]
        self._answers.clear()
        self._queue.clear()
        self._out.clear()
        self._current = None
        return [MoveDone(op.op, 0, reason) for op in failed]

    # -- out

    def pieces(self) -> list[memoryview]:
        """What to send next, empty when there is nothing; `sent` says how much of it left."""
        if self.is_welcome:
            self._refill()
        return [self._out[index] for index in range(min(len(self._out), PIECES_MAX))]

    def sent(self, count: int) -> None:
        self._out_bytes -= count
        while count:
            piece = self._out.popleft()
            if count < len(piece):
                self._out.appendleft(piece[count:])
                return
            count -= len(piece)

    def _refill(self) -> None:
        while self._out_bytes < WINDOW_BYTES:
            if self._current is None:
                if not self._queue:
                    return
                self._current = self._queue.popleft()
                attempt = msgspec.msgpack.encode(self._current.attempt)
                self._put(control_frame(Kind.BEGIN, self._seed, op=self._current.op, payload=attempt))
            self._put_next(self._current)

    def _put_next(self, op: SendOp) -> None:
        if op.cancelled or op.begun == len(op.pages):
            self._put(control_frame(Kind.END, self._seed, op=op.op, number=op.begun))
            self._answers.append(op)
            self._current = None
            return
        run = op.pages[op.begun : op.begun + run_length(self._page_bytes)]
        op.begun += len(run)
        for piece in pages_frame(self._seed, op.op, [(target, self._page(source)) for source, target in run]):
            self._put(piece)

    def _page(self, page: int) -> memoryview:
        return self._pages[page * self._page_bytes : (page + 1) * self._page_bytes]

    def _put(self, data: bytes | memoryview) -> None:
        self._out.append(memoryview(data))
        self._out_bytes += len(data)

    # -- in

    def buffers(self) -> list[memoryview]:
        return self._reader.buffers()

    def filled(self, count: int) -> list[MoveDone]:
        """Ops that have ended. Raises ProtocolError: hang up."""
        return [done for read in self._reader.filled(count) for done in self._take(read)]

    def _take(self, frame: Frame | PageEnded) -> list[MoveDone]:
        if isinstance(frame, PageEnded):
            raise ProtocolError("a page where none is expected")
        kind = frame.header.kind
        if not self.is_welcome:
            if kind is Kind.REFUSED:
                raise ProtocolError(f"refused: {reason_of(frame)}")
            if kind is not Kind.WELCOME or frame.header.number != self._seed:
                raise ProtocolError("welcome expected")
            self.is_welcome = True
            self._reader.seed = self._seed
            self._on_welcome()
            return []
        if kind is Kind.ALIVE:
            return []
        if kind is not Kind.DONE or not self._answers or self._answers[0].op != frame.header.op:
            raise ProtocolError("answer to no op")
        op = self._answers.popleft()
        if frame.header.number > len(op.pages):
            raise ProtocolError("more pages than were sent")
        if frame.header.number == len(op.pages):
            return [MoveDone(op.op, len(op.pages))]
        return [MoveDone(op.op, frame.header.number, reason_of(frame) or "cancelled")]
