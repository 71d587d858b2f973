"""The wire reader and the two sessions without sockets: any chunking, any corruption."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.base import MoveDone
from kvstore.connectors.page_loans import PageLoans
from kvstore.connectors.tcp_frames import (
    ENTRY,
    HEADER_BYTES,
    FrameReader,
    Greeting,
    Kind,
    PageEnded,
    ProtocolError,
    control_frame,
    header,
    pages_frame,
)
from kvstore.connectors.tcp_receiving import ANSWERS_BYTES_MAX, ReceivingSession
from kvstore.connectors.tcp_sending import SendingSession, SendOp
from segue.ids import AttemptRef, InstanceRef

P, D = InstanceRef("p", 1), InstanceRef("d", 1)
ATTEMPT = AttemptRef("r", 1)
PAGES, PAGE_BYTES, SEED = 4, 100, 77
GREETING = Greeting(P, D, PAGE_BYTES, b"nonce")


def page_frame(op: int, page: int, content: bytes) -> bytes:
    return pages_of(op, [(page, content)])


def pages_of(op: int, pages: list[tuple[int, bytes]]) -> bytes:
    return b"".join(pages_frame(SEED, op, [(page, memoryview(content)) for page, content in pages]))


class Pool:
    """Memory of a target, whose pages in `closed` may not be written."""

    def __init__(self, closed: tuple[int, ...] = ()) -> None:
        self.memory = bytearray(PAGES * PAGE_BYTES)
        self._closed = closed

    def place(self, op: int, page: int) -> memoryview | None:
        if page >= PAGES or page in self._closed:
            return None
        return memoryview(self.memory)[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


Reader = FrameReader | ReceivingSession | SendingSession


def feed(reader: Reader, data: bytes, said: list[object] | None = None) -> list[object]:
    """What the reader says (also in `said`), fed as the kernel does: never more than its buffer takes."""
    said = [] if said is None else said
    rest = memoryview(data)
    while rest:
        count = 0
        for buffer in reader.buffers():
            piece = rest[count : count + len(buffer)]
            buffer[: len(piece)] = piece
            count += len(piece)
        said.extend(reader.filled(count) or ())
        rest = rest[count:]
    return said


Parts = list[bytes | list[tuple[int, bytes]]]
STREAMS: st.SearchStrategy[Parts] = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.integers(0, PAGES + 2), st.binary(min_size=PAGE_BYTES, max_size=PAGE_BYTES)),
            min_size=1,
            max_size=4,
        ),
        st.binary(max_size=60),
    ),
    max_size=6,
)


def stream_of(parts: Parts) -> bytes:
    frames = [
        control_frame(Kind.BEGIN, SEED, op=1, payload=part) if isinstance(part, bytes) else pages_of(1, part)
        for part in parts
    ]
    return b"".join(frames)


def read(data: bytes, pieces: list[int]) -> tuple[list[object], str, bytes]:
    """(frames, why it ended, memory) of `data` that comes in pieces of these lengths, then the rest."""
    pool = Pool(closed=(2,))
    reader = FrameReader(PAGE_BYTES, pool.place)
    reader.seed = SEED
    said: list[object] = []
    try:
        for length in [*pieces, len(data)]:
            feed(reader, data[:length], said)
            data = data[length:]
    except ProtocolError as error:
        return said, str(error), bytes(pool.memory)
    return said, "", bytes(pool.memory)


def events_of(parts: Parts) -> int:
    return sum(1 if isinstance(part, bytes) else len(part) for part in parts)


@given(STREAMS, st.lists(st.integers(1, 150), max_size=12))
def test_same_bytes_in_other_pieces_are_the_same_frames(parts: Parts, cuts: list[int]) -> None:
    data = stream_of(parts)
    assert read(data, cuts) == read(data, [])
    assert len(read(data, cuts)[0]) == events_of(parts)


@given(STREAMS.filter(bool), st.data())
def test_corrupt_byte_is_noticed_whatever_the_pieces(parts: Parts, data: st.DataObject) -> None:
    whole = bytearray(stream_of(parts))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    cuts = data.draw(st.lists(st.integers(1, 150), max_size=12))
    assert read(bytes(whole), cuts) == read(bytes(whole), [])
    frames, ended, _ = read(bytes(whole), cuts)
    torn = [frame for frame in frames if isinstance(frame, PageEnded) and not frame.intact]
    assert ended or torn
    if ended:
        assert len(frames) < events_of(parts)


@given(st.binary(min_size=HEADER_BYTES, max_size=500), st.lists(st.integers(1, 60), max_size=12))
def test_noise_ends_the_reading_and_writes_nothing(noise: bytes, cuts: list[int]) -> None:
    frames, ended, memory = read(noise, cuts)
    assert frames == [] and ended and not any(memory)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (control_frame(Kind.BEGIN, SEED + 1), "another session"),
        (header(Kind.PAGES, SEED, number=1, length=PAGE_BYTES + 1), "length"),
        (header(Kind.BEGIN, SEED, length=1 << 30), "length"),
        (header(99, SEED), "unknown kind"),  # type: ignore[arg-type]
        (bytes(HEADER_BYTES), "no frame"),
    ],
)
def test_malformed_header_ends_the_reading(frame: bytes, reason: str) -> None:
    _, ended, memory = read(frame, [])
    assert reason in ended and not any(memory)


def test_page_that_may_not_be_written_is_read_past() -> None:
    frames, ended, memory = read(page_frame(1, 2, b"x" * PAGE_BYTES) + page_frame(1, 1, b"y" * PAGE_BYTES), [])
    assert [frame.intact for frame in frames if isinstance(frame, PageEnded)] == [False, True]
    assert not ended and memory == bytes(PAGE_BYTES) + b"y" * PAGE_BYTES + bytes(2 * PAGE_BYTES)


def test_page_taken_back_half_way_is_not_written_from_then_on() -> None:
    memory = bytearray(PAGE_BYTES)
    is_open = True
    reader = FrameReader(PAGE_BYTES, lambda op, page: memoryview(memory) if is_open else None)
    reader.seed = SEED
    frame = page_frame(1, 0, b"z" * PAGE_BYTES)
    feed(reader, frame[: HEADER_BYTES + ENTRY.size + 30])
    is_open = False
    (ended,) = feed(reader, frame[HEADER_BYTES + ENTRY.size + 30 :])
    assert isinstance(ended, PageEnded) and not ended.intact
    assert memory == b"z" * 30 + bytes(PAGE_BYTES - 30)


class Pair:
    """A sending and a receiving session joined by nothing but bytes."""

    def __init__(self, refusal: str = "") -> None:
        self.source_pages = bytearray(b"".join(bytes([page + 1]) * PAGE_BYTES for page in range(PAGES)))
        self.target_pages = bytearray(PAGES * PAGE_BYTES)
        self.loans = PageLoans()
        self.sending = SendingSession(GREETING, memoryview(self.source_pages))
        self.receiving = ReceivingSession(
            memoryview(self.target_pages), PAGE_BYTES, self.loans, lambda greeting: refusal
        )

    def carry(self) -> list[MoveDone]:
        """Bytes go both ways until none are left; what has ended at the source."""
        done: list[MoveDone] = []
        while pieces := self.sending.pieces():
            data = b"".join(pieces)
            self.sending.sent(len(data))
            feed(self.receiving, data)
            answers, self.receiving.answers = bytes(self.receiving.answers), bytearray()
            for ended in feed(self.sending, answers):
                assert isinstance(ended, MoveDone)
                done.append(ended)
        return done

    def at_target(self) -> list[int]:
        return [self.target_pages[page * PAGE_BYTES] for page in range(PAGES)]


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.carry()
    return made


def test_pages_of_one_op_land(pair: Pair) -> None:
    pair.loans.lend(P, ATTEMPT, [3, 1])
    pair.sending.add(SendOp(1, ATTEMPT, [(0, 3), (1, 1)]))
    assert pair.carry() == [MoveDone(1, 2)]
    assert pair.at_target() == [0, 2, 0, 1]
    assert pair.sending.is_idle


def test_page_that_is_not_lent_cuts_the_op_there(pair: Pair) -> None:
    pair.loans.lend(P, ATTEMPT, [0, 2])
    pair.sending.add(SendOp(1, ATTEMPT, [(0, 0), (1, 1), (2, 2)]))
    assert pair.carry() == [MoveDone(1, 1, "page 1 is not lent")]
    assert pair.at_target()[1] == 0


def test_page_of_another_attempt_or_incarnation_is_not_written(pair: Pair) -> None:
    pair.loans.lend(P, AttemptRef("r", 2), [0])
    pair.loans.lend(InstanceRef("p", 2), ATTEMPT, [1])
    pair.sending.add(SendOp(1, ATTEMPT, [(0, 0)]))
    pair.sending.add(SendOp(2, ATTEMPT, [(0, 1)]))
    assert [done.moved for done in pair.carry()] == [0, 0]
    assert pair.at_target() == [0, 0, 0, 0]


def test_page_that_has_landed_is_not_written_again(pair: Pair) -> None:
    pair.loans.lend(P, ATTEMPT, [0])
    pair.sending.add(SendOp(1, ATTEMPT, [(0, 0)]))
    pair.sending.add(SendOp(2, ATTEMPT, [(0, 0)]))
    pair.sending.add(SendOp(3, ATTEMPT, [(1, 0)]))
    assert [(done.op, done.moved) for done in pair.carry()] == [(1, 1), (2, 1), (3, 0)]
    assert pair.at_target()[0] == 1


def test_unwelcome_greeting_ends_the_source_with_the_reason() -> None:
    with pytest.raises(ProtocolError, match="refused: not today"):
        Pair("not today").carry()


@pytest.mark.parametrize("first", [Kind.BEGIN, Kind.END, Kind.DONE])
def test_nothing_is_read_before_a_greeting(first: Kind) -> None:
    pair = Pair()
    with pytest.raises(ProtocolError, match="greeting expected"):
        feed(pair.receiving, control_frame(first, 0))


def test_no_page_is_taken_before_a_greeting() -> None:
    pair = Pair()
    pair.loans.lend(P, ATTEMPT, [0])
    with pytest.raises(ProtocolError, match="outside an op"):
        feed(pair.receiving, b"".join(pages_frame(0, 1, [(0, memoryview(b"x" * PAGE_BYTES))])))
    assert not any(pair.target_pages)


def test_cancelled_op_is_cut_short(pair: Pair) -> None:
    op = SendOp(1, ATTEMPT, [(0, 0)] * 100_000)
    pair.loans.lend(P, ATTEMPT, [0])
    pair.sending.add(op)
    pair.sending.pieces()
    assert pair.sending.cancel(1) == []
    (done,) = pair.carry()
    assert 0 < done.moved < 100_000 and done.error == "cancelled"


def test_end_of_the_connection_ends_every_op_once(pair: Pair) -> None:
    pair.loans.lend(P, ATTEMPT, [0])
    for op in (1, 2, 3):
        pair.sending.add(SendOp(op, ATTEMPT, [(0, 0)]))
    pair.sending.pieces()
    failed = pair.sending.fail("broken")
    assert sorted((done.op, done.moved, done.error) for done in failed) == [(op, 0, "broken") for op in (1, 2, 3)]
    assert pair.sending.fail("broken") == []


def test_answer_to_no_op_ends_the_source(pair: Pair) -> None:
    seed = pair.sending._seed
    with pytest.raises(ProtocolError, match="answer to no op"):
        feed(pair.sending, control_frame(Kind.DONE, seed, op=5, number=1))


def test_source_that_does_not_read_its_answers_is_hung_up_on(pair: Pair) -> None:
    """Ops without pages cost nothing to send and an answer each."""
    with pytest.raises(ProtocolError, match="answers are not read"):
        for op in range(ANSWERS_BYTES_MAX // HEADER_BYTES + 1):
            pair.sending.add(SendOp(op, ATTEMPT, []))
            for piece in (data := pair.sending.pieces()):
                feed(pair.receiving, bytes(piece))
            pair.sending.sent(sum(len(piece) for piece in data))
