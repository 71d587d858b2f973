"""Frames of a page connection, and a reader of them that does no I/O.

    header, 40 bytes, little-endian:
      magic u16 | kind u8 | version u8 | length u32 | op u64 | number u64 | digest u64 | check u64
    payload, `length` bytes

`digest` is xxh3_64 of the payload. `check` is xxh3_64 of the 32 bytes before it, seeded with the session (nonce and
both incarnations): a frame of another session, or a header with one byte changed, is seen before anything is believed
of it, above all where a page goes. Neither is a signature: the network between instances is private.

    source -> target   GREET(greeting)  { BEGIN(op, attempt)  PAGES(op, n)*  END(op, pages sent) }*
    target -> source   WELCOME | REFUSED(reason)  { ALIVE | DONE(op, pages valid, reason) }*

PAGES carries a table of n entries (page number u64, digest of the page u64), and then the n pages. Its own `digest` is
that of the table, so that no byte of a page is read before it is certain where it goes.

ALIVE says that bytes still arrive: a source whose bytes are all in some buffer knows a slow network from a dead one.

The reader never owns page bytes: it says where the next bytes of the stream belong (`buffers`), the caller lets the
kernel put them there, and says how many came (`filled`). Several pages and the next header are asked for at once: one
system call more for each page costs as much as the copying of some 200 KiB on a virtual machine.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec
import xxhash

from segue.errors import SegueError
from segue.ids import AttemptRef, InstanceRef

MAGIC = 0x5347
VERSION = 1
HEADER = struct.Struct("<HBBIQQQ")
CHECK = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECK.size
ENTRY = struct.Struct("<QQ")

CONTROL_BYTES_MAX = 4096
"""Payload of a frame that is no page: two instances and a nonce, or an attempt, or a reason."""

READ_BYTES_MAX = 2 << 20
"""Bytes of pages asked of the kernel at once: some 400 us of copying, the longest that taking a page back waits."""

RUN_BYTES = 4 << 20
RUN_PAGES_MAX = 64
"""Pages of one frame: as many as fit RUN_BYTES, at least one, at most this."""

SCRATCH_BYTES = 64 << 10
"""Pages that may not be written are read into this and forgotten."""


class ProtocolError(SegueError):
    """The peer does not speak this protocol, or not in this session. The connection is of no more use."""


class Kind(IntEnum):
    GREET = 1
    WELCOME = 2
    REFUSED = 3
    BEGIN = 4
    PAGES = 5
    END = 6
    DONE = 7
    ALIVE = 8


class Header(msgspec.Struct, frozen=True):
    kind: Kind
    length: int
    op: int
    number: int
    digest: int


class Frame(msgspec.Struct, frozen=True):
    """One whole frame that is not PAGES."""

    header: Header
    payload: bytes


class PageEnded(msgspec.Struct, frozen=True):
    """The last byte of a page of op `op` was read. `intact`: all of it stands where it belongs, with this digest."""

    op: int
    page: int
    digest: int
    intact: bool


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a source: who speaks to whom, and the secret of the target's offer."""

    source: InstanceRef
    target: InstanceRef
    page_bytes: int
    nonce: bytes


def session_seed(greeting: Greeting) -> int:
    """What both ends seed header checks with once the greeting is said."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(greeting))


def page_digest(page: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(page)


def header(kind: Kind, seed: int, *, op: int = 0, number: int = 0, digest: int = 0, length: int = 0) -> bytes:
    head = HEADER.pack(MAGIC, kind, VERSION, length, op, number, digest)
    return head + CHECK.pack(xxhash.xxh3_64_intdigest(head, seed))


def control_frame(kind: Kind, seed: int, *, op: int = 0, number: int = 0, payload: bytes = b"") -> bytes:
    """Raises ValueError for a payload over CONTROL_BYTES_MAX."""
    if len(payload) > CONTROL_BYTES_MAX:
        raise ValueError(f"{kind.name} of {len(payload)} bytes, at most {CONTROL_BYTES_MAX}")
    digest = xxhash.xxh3_64_intdigest(payload)
    return header(kind, seed, op=op, number=number, digest=digest, length=len(payload)) + payload


def pages_frame(seed: int, op: int, pages: Sequence[tuple[int, memoryview]]) -> list[bytes | memoryview]:
    """Header and table, then the memory of each (page number, content)."""
    table = b"".join(ENTRY.pack(number, page_digest(content)) for number, content in pages)
    length = len(table) + sum(len(content) for _, content in pages)
    digest = xxhash.xxh3_64_intdigest(table)
    head = header(Kind.PAGES, seed, op=op, number=len(pages), digest=digest, length=length)
    return [head + table, *(content for _, content in pages)]


def run_length(page_bytes: int) -> int:
    return max(1, min(RUN_PAGES_MAX, RUN_BYTES // page_bytes))


def greeting_of(frame: Frame) -> Greeting:
    return _decoded(frame, _greetings)


def attempt_of(frame: Frame) -> AttemptRef:
    return _decoded(frame, _attempts)


def reason_of(frame: Frame) -> str:
    return frame.payload.decode("utf-8", "replace")


T = TypeVar("T")

_greetings = msgspec.msgpack.Decoder(Greeting)
_attempts = msgspec.msgpack.Decoder(AttemptRef)


def _decoded(frame: Frame, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(frame.payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"malformed {frame.header.kind.name}") from error


Place = Callable[[int, int], memoryview | None]
"""(op, page number) -> its memory while it may be written."""


class _Page:
    __slots__ = ("digest", "discarded", "hash", "have", "number")

    def __init__(self, number: int, digest: int) -> None:
        self.number = number
        self.digest = digest
        self.have = 0
        self.discarded = False
        self.hash = xxhash.xxh3_64()


class FrameReader:
    """Bytes of one direction of one connection -> frames and pages, whatever the pieces in which they come.

    `place` gives the memory of a page while the peer may write it, None when it may not (any more). It is asked anew
    before each read, so a page that is taken back in the middle of its bytes is not written from then on.
    """

    def __init__(self, page_bytes: int, place: Place = lambda op, page: None) -> None:
        self.seed = 0
        """Of the session; 0 until the greeting was read. To be set between two frames."""
        self._page_bytes = page_bytes
        self._place = place
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch = memoryview(bytearray(min(SCRATCH_BYTES, page_bytes)))
        self._header: Header | None = None
        self._have = 0
        """Of the header, or of the payload that is no page."""
        self._payload = memoryview(b"")
        self._pages: deque[_Page] = deque()
        """Of the current frame, not read to the end yet."""
        self._offered: list[tuple[_Page | None, memoryview]] = []

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in this order. Never empty, and good until `filled` is called."""
        if self._pages:
            assert self._header is not None
            self._offered = self._offer_pages(self._header.op)
        else:
            rest = self._head if self._header is None else self._payload
            self._offered = [(None, rest[self._have :])]
        return [buffer for _, buffer in self._offered]

    def filled(self, count: int) -> Iterator[Frame | PageEnded]:
        """`count` bytes were put into `buffers()`: what they complete. Raises ProtocolError.

        Each has to be dealt with before the next is asked for: it may decide how that is read."""
        for page, buffer in self._offered:
            taken = min(count, len(buffer))
            if taken == 0:
                return
            count -= taken
            if page is None:
                yield from self._took_small(taken)
            else:
                yield from self._took_of_page(page, buffer[:taken])

    # -- headers, tables, and payloads of other frames

    def _took_small(self, count: int) -> Iterator[Frame]:
        self._have += count
        if self._header is None:
            if self._have < HEADER_BYTES:
                return
            self._header = self._parse()
            self._have = 0
            table = self._header.number * ENTRY.size
            self._payload = memoryview(bytearray(table if self._header.kind is Kind.PAGES else self._header.length))
        if self._have < len(self._payload):
            return
        if self._header.digest != xxhash.xxh3_64_intdigest(self._payload):
            raise ProtocolError("corrupt payload")
        if self._header.kind is Kind.PAGES:
            self._pages.extend(_Page(*entry) for entry in ENTRY.iter_unpack(self._payload))
            return
        frame = Frame(self._header, bytes(self._payload))
        self._next_frame()
        yield frame

    def _parse(self) -> Header:
        magic, kind, version, length, op, number, digest = HEADER.unpack_from(self._head)
        (check,) = CHECK.unpack_from(self._head, HEADER.size)
        if magic != MAGIC:
            raise ProtocolError("no frame of this protocol")
        if version != VERSION:
            raise ProtocolError("another version of this protocol")
        if check != xxhash.xxh3_64_intdigest(self._head[: HEADER.size], self.seed):
            raise ProtocolError("header of another session, or corrupt")
        if kind not in Kind.__members__.values():
            raise ProtocolError("unknown kind of frame")
        if kind == Kind.PAGES:
            right = 0 < number <= RUN_PAGES_MAX and length == number * (ENTRY.size + self._page_bytes)
        else:
            right = length <= CONTROL_BYTES_MAX
        if not right:
            raise ProtocolError("length of frame")
        return Header(Kind(kind), length, op, number, digest)

    def _next_frame(self) -> None:
        self._header = None
        self._have = 0
        self._payload = memoryview(b"")

    # -- pages

    def _offer_pages(self, op: int) -> list[tuple[_Page | None, memoryview]]:
        """Memory of the pages to come, up to the first that may not be written; after the last one the next header.

        A page that comes twice ends it as well: its first content is judged before the second may land on it."""
        offered: list[tuple[_Page | None, memoryview]] = []
        numbers: set[int] = set()
        room = READ_BYTES_MAX
        for page in self._pages:
            if page.number in numbers:
                return offered
            numbers.add(page.number)
            memory = None if page.discarded else self._place(op, page.number)
            if memory is None:
                if not offered:
                    page.discarded = True
                    offered.append((page, self._scratch[: self._page_bytes - page.have]))
                return offered
            buffer = memory[page.have : page.have + room]
            offered.append((page, buffer))
            room -= len(buffer)
            if room == 0:
                return offered
        return [*offered, (None, self._head)]

    def _took_of_page(self, page: _Page, content: memoryview) -> Iterator[PageEnded]:
        assert self._header is not None
        page.have += len(content)
        if not page.discarded:
            page.hash.update(content)
        if page.have < self._page_bytes:
            return
        self._pages.popleft()
        intact = not page.discarded and page.hash.intdigest() == page.digest
        ended = PageEnded(self._header.op, page.number, page.digest, intact)
        if not self._pages:
            self._next_frame()
        yield ended
