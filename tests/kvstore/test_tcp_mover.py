"""What is particular to TCP: who may write, fences with writes in flight, broken, slow and lying connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from byte_proxy import ByteProxy, Faults
from mover_ends import ATTEMPT, PAGE_BYTES, PAGES, WAIT_S, D, Ends, P, tcp_ends

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.process_identity import this_process
from kvstore.connectors.tcp import TcpMover
from kvstore.connectors.tcp_frames import ENTRY, HEADER_BYTES, Greeting, Kind, control_frame
from segue.errors import ConfigError
from segue.ids import InstanceRef

MANY = [(page % PAGES, page % PAGES) for page in range(4000)]
"""An op of 2 MB: longer than what is made ready at once."""


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = tcp_ends()
    yield made
    made.close()


@pytest.fixture
def proxied() -> Iterator[tuple[Ends, ByteProxy]]:
    """A pair whose connections go through a proxy; stalls count after a second."""
    made = tcp_ends(stall_s=1.0)
    (offer,) = made.target.describe()
    proxy = ByteProxy(offer.location)
    made.target.register(P, this_process(), [])
    made.source.register(D, this_process(), [msgspec.structs.replace(offer, location=proxy.location)])
    made.lend_all()
    yield made, proxy
    made.close()
    proxy.close()


def ended_of(mover: object) -> list[str]:
    assert isinstance(mover, TcpMover)
    return sorted(mover.ended)


def until(condition: Callable[[], object]) -> None:
    """Another thread does it soon; the test's own time limit ends the wait."""
    while not condition():
        time.sleep(0.005)


def dial(ends: Ends) -> socket.socket:
    (offer,) = ends.target.describe()
    host, _, port = offer.location.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def refusal(ends: Ends, **changes: object) -> str:
    (offer,) = ends.target.describe()
    greeting = msgspec.structs.replace(Greeting(P, D, PAGE_BYTES, offer.nonce), **changes)
    with dial(ends) as sock:
        sock.sendall(control_frame(Kind.GREET, 0, payload=msgspec.msgpack.encode(greeting)))
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    return answer[HEADER_BYTES:].decode()


def test_page_that_is_not_lent_is_not_written(ends: Ends) -> None:
    ends.connect()
    ends.fill(0, 9)
    ends.target.receive(P, ATTEMPT, [0, 2])
    ends.source.send(1, D, ATTEMPT, [(0, 0), (0, 1), (0, 2)])
    assert ends.wait() == MoveDone(1, 1, "page 1 is not lent")
    assert ends.at_target(1)[0] == 0


def test_fence_with_writes_in_flight_ends_all_writing(ends: Ends) -> None:
    """From the moment the fence returns the memory stays as it is, though the source goes on sending."""
    ends.connect()
    for _ in range(20):
        ends.lend_all()
        ends.fill(0, 7)
        ends.source.send(1, D, ATTEMPT, MANY)
        assert ends.target.fence(P)
        before = bytes(ends.target_pages)
        ends.target_pages[:] = bytes([1]) * len(ends.target_pages)
        done = ends.wait()
        assert bytes(ends.target_pages) == bytes([1]) * len(before)
        assert done.moved == 0 or done.error == ""


def test_taking_back_one_attempt_leaves_the_others(ends: Ends) -> None:
    ends.connect()
    other = msgspec.structs.replace(ATTEMPT, attempt=2)
    ends.target.receive(P, ATTEMPT, [0])
    ends.target.receive(P, other, [1])
    assert ends.target.fence(P, ATTEMPT)
    ends.fill(0, 4)
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    ends.source.send(2, D, other, [(0, 1)])
    assert [done.moved for done in ends.wait_all(2)] == [0, 1]
    assert (ends.at_target(0)[0], ends.at_target(1)[0]) == (0, 4)


def test_fenced_source_that_is_lent_to_again_can_write(ends: Ends) -> None:
    ends.connect()
    assert ends.target.fence(P)
    until(lambda: "fenced" in ended_of(ends.target))
    until(lambda: ended_of(ends.source))
    ends.lend_all()
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    assert ends.wait() == MoveDone(1, 1)


def test_forgotten_source_is_refused(ends: Ends) -> None:
    ends.connect()
    ends.target.forget(P)
    until(lambda: ended_of(ends.source))
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    assert "never registered" in ends.wait().error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": InstanceRef("d", 2)}, "another incarnation lives here"),
        ({"source": InstanceRef("p", 2)}, "source was never registered"),
        ({"nonce": b"guess"}, "the nonce differs"),
        ({"page_bytes": 8}, "page size differs"),
    ],
)
def test_greeting_that_does_not_fit_is_refused(ends: Ends, changes: dict[str, object], reason: str) -> None:
    ends.connect()
    assert refusal(ends, **changes) == reason
    until(lambda: f"refused: {reason}" in ended_of(ends.target))


def test_noise_is_hung_up_on_and_counted(ends: Ends) -> None:
    ends.connect()
    with dial(ends) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
        until(lambda: "no frame of this protocol" in ended_of(ends.target))
    assert not any(ends.target_pages)


def test_listening_on_no_address_of_this_machine_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="page connections on"):
        TcpMover(D, memoryview(bytearray(PAGE_BYTES)), PAGE_BYTES, listen_host="192.0.2.1")


def test_broken_connection_ends_the_op_and_the_next_one_dials_again(proxied: tuple[Ends, ByteProxy]) -> None:
    ends, proxy = proxied
    proxy.faults = Faults(cut_at=proxy.bytes_seen + 100_000)
    ends.source.send(1, D, ATTEMPT, MANY)
    done = ends.wait()
    assert done.moved == 0 and done.error
    ends.source.send(2, D, ATTEMPT, [(0, 0)])
    assert ends.wait() == MoveDone(2, 1)
    assert proxy.connections == 2


def test_corrupt_page_cuts_the_op_there(proxied: tuple[Ends, ByteProxy]) -> None:
    ends, proxy = proxied
    begin = len(control_frame(Kind.BEGIN, 0, payload=msgspec.msgpack.encode(ATTEMPT)))
    third = proxy.bytes_seen + begin + HEADER_BYTES + 5 * ENTRY.size + 2 * PAGE_BYTES
    proxy.faults = Faults(corrupt_at=third + 200)
    ends.source.send(1, D, ATTEMPT, [(page, page) for page in range(5)])
    assert ends.wait() == MoveDone(1, 2, "page 2 came corrupt")


def test_corrupt_header_breaks_the_connection(proxied: tuple[Ends, ByteProxy]) -> None:
    ends, proxy = proxied
    proxy.faults = Faults(corrupt_at=proxy.bytes_seen + 9)
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    assert ends.wait().moved == 0
    until(lambda: "header of another session, or corrupt" in ended_of(ends.target))
    assert not any(ends.target_pages)


def test_half_open_connection_is_noticed(proxied: tuple[Ends, ByteProxy]) -> None:
    ends, proxy = proxied
    proxy.faults = Faults(swallow_at=proxy.bytes_seen + 1000)
    ends.source.send(1, D, ATTEMPT, [(page, page) for page in range(PAGES)])
    assert ends.wait() == MoveDone(1, 0, "no progress")
    proxy.faults = Faults()
    ends.source.send(2, D, ATTEMPT, [(0, 0)])
    assert ends.wait() == MoveDone(2, 1)


def test_slow_connection_is_not_a_broken_one(proxied: tuple[Ends, ByteProxy]) -> None:
    ends, proxy = proxied
    proxy.faults = Faults(delay_s=0.02)
    ends.source.send(1, D, ATTEMPT, MANY)
    assert ends.wait() == MoveDone(1, len(MANY))


def test_target_that_never_welcomes_is_refused_in_time(ends: Ends) -> None:
    (offer,) = ends.target.describe()
    proxy = ByteProxy(offer.location)
    proxy.faults = Faults(swallow_at=0)
    with pytest.raises(MoverError, match="no answer"):
        ends.source.register(D, this_process(), [msgspec.structs.replace(offer, location=proxy.location)])
    proxy.close()
