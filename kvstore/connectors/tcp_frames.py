"""Frames of a page connection, and a reader of them that does no I/O.

    header, 40 bytes, little-endian:
      magic u16 | kind u8 | version u8 | length u32 | op u64 | number u64 | digest u64 | check u64
    payload, `length` bytes

`digest` is xxh3_64 of the payload. `check` is xxh3_64 of the 32 bytes before it, seeded with the session (nonce and
both incarnations): a frame of another session, or a header with one byte changed, is seen before anything is believed
of it, above all where a page goes. Neither is a signature: the network between instances is private.

    source -> target   GREET(greeting)  { BEGIN(op, attempt)  PAGE(op, page number)*  END(op, pages sent) }*
    target -> source   WELCOME | REFUSED(reason)  { ALIVE | DONE(op, pages valid, reason) }*

ALIVE says that bytes still arrive: a source whose bytes are all in some buffer knows a slow network from a dead one.

The reader never owns page bytes: it says where the next bytes of the stream belong (`buffers`), the caller lets the
kernel put them there, and says how many came (`filled`). The header after a payload is asked for together with it, so
that a page costs one system call: on loopback every call more costs the copying of some 50 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
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

CONTROL_BYTES_MAX = 4096
"""Payload of a frame that is no page: two instances and a nonce, or an attempt, or a reason."""

READ_BYTES_MAX = 1 << 20
"""Bytes of a page asked of the kernel at once: some 200 us of copying, the longest that taking a page back waits."""

SCRATCH_BYTES = 64 << 10
"""Pages that may not be written are read into this and forgotten."""


class ProtocolError(SegueError):
    """The peer does not speak this protocol, or not in this session. The connection is of no more use."""


class Kind(IntEnum):
    GREET = 1
    WELCOME = 2
    REFUSED = 3
    BEGIN = 4
    PAGE = 5
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
    """One whole frame. The payload of a PAGE is where it belongs, if `intact`; `payload` is that of all others."""

    header: Header
    payload: bytes = b""
    intact: bool = True


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


Place = Callable[[Header], memoryview | None]


class FrameReader:
    """Bytes of one direction of one connection -> frames, whatever the pieces in which they come.

    `place` gives the memory of a PAGE while the peer may write it, None when it may not (any more). It is asked anew
    before each piece, so a page that is taken back in the middle of its bytes is not written from then on.
    """

    def __init__(self, page_bytes: int, place: Place = lambda header: None) -> None:
        self.seed = 0
        """Of the session; 0 until the greeting was read. To be set between two frames."""
        self._page_bytes = page_bytes
        self._place = place
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch: memoryview | None = None
        self._header: Header | None = None
        self._have = 0
        self._payload = memoryview(b"")
        self._piece = memoryview(b"")
        self._digest = xxhash.xxh3_64()
        self._discarded = False

    @property
    def is_between_frames(self) -> bool:
        return self._header is None and self._have == 0

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in this order. Never empty, and good until `filled` is called."""
        if self._header is None:
            self._piece = self._head[self._have :]
            return [self._piece]
        whole = self._page_piece(self._header) if self._header.kind is Kind.PAGE else self._payload[self._have :]
        self._piece = whole
        ends_frame = self._have + len(whole) == self._header.length
        return [whole, self._head] if ends_frame else [whole]

    def filled(self, count: int) -> Iterator[Frame]:
        """`count` bytes were put into `buffers()`: the frames that they complete. Raises ProtocolError.

        Each frame has to be dealt with before the next is asked for: it may decide how that is read."""
        taken = min(count, len(self._piece))
        yield from self._took(taken)
        if count > taken:
            self._piece = self._head
            yield from self._took(count - taken)

    def _took(self, count: int) -> Iterator[Frame]:
        self._have += count
        if self._header is None:
            if self._have < HEADER_BYTES:
                return
            self._open(self._parse())
        elif not self._discarded:
            self._digest.update(self._piece[:count])
        assert self._header is not None
        if self._have == self._header.length:
            yield self._close(self._header)

    def _page_piece(self, header: Header) -> memoryview:
        left = header.length - self._have
        page = None if self._discarded else self._place(header)
        if page is None:
            self._discarded = True
            if self._scratch is None:
                self._scratch = memoryview(bytearray(SCRATCH_BYTES))
            return self._scratch[: min(left, SCRATCH_BYTES)]
        return page[self._have : self._have + min(left, READ_BYTES_MAX)]

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
        right = length == self._page_bytes if kind == Kind.PAGE else length <= CONTROL_BYTES_MAX
        if not right:
            raise ProtocolError("length of frame")
        return Header(Kind(kind), length, op, number, digest)

    def _open(self, header: Header) -> None:
        self._header = header
        self._have = 0
        self._discarded = False
        self._digest.reset()
        if header.kind is not Kind.PAGE:
            self._payload = memoryview(bytearray(header.length))

    def _close(self, header: Header) -> Frame:
        intact = not self._discarded and self._digest.intdigest() == header.digest
        payload = b"" if header.kind is Kind.PAGE else bytes(self._payload)
        if header.kind is not Kind.PAGE and not intact:
            raise ProtocolError("corrupt payload")
        self._header = None
        self._have = 0
        self._piece = self._payload = memoryview(b"")
        return Frame(header, payload, intact)
