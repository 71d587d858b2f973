"""Messages over ZeroMQ are the same however the network cuts their bytes: events, reports, hand-off control."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from byte_proxy import ByteProxy

from kvstore.connectors.control_zmq import ControlChannel
from kvstore.events_zmq import EventPublisher, EventSubscriber
from segue.handoff_messages import ControlMessage, Grant, GrantRequest
from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch

P, D = InstanceRef("p", 1), InstanceRef("d", 2)
EVENTS: list[KvEvent] = [
    BlocksStored(b"", [bytes([number]) * 16 for number in range(60)]),
    BlocksRemoved([b"x" * 16] * 40),
    BlocksCleared(),
]


@pytest.fixture(params=[1, 3, 250])
def cut(request: pytest.FixtureRequest) -> Iterator[list[ByteProxy]]:
    """Proxies made by a test with `through`: they pass bytes on one, three or 250 at a time."""
    proxies: list[ByteProxy] = []
    yield proxies
    for proxy in proxies:
        proxy.close()


def through(proxies: list[ByteProxy], address: str, piece_bytes: int) -> str:
    proxy = ByteProxy(address.removeprefix("tcp://"))
    proxy.faults.piece_bytes = piece_bytes
    proxies.append(proxy)
    return f"tcp://{proxy.location}"


async def test_control_messages_in_pieces(cut: list[ByteProxy], request: pytest.FixtureRequest) -> None:
    piece_bytes = request.node.callspec.params["cut"]
    inboxes: dict[InstanceRef, asyncio.Queue[ControlMessage]] = {P: asyncio.Queue(), D: asyncio.Queue()}
    p, d = (ControlChannel(ref, inboxes[ref].put_nowait) for ref in (P, D))
    p.dial(D, through(cut, d.listen("tcp://127.0.0.1:*"), piece_bytes))
    asked = [GrantRequest("r" * number, number, P, D) for number in range(1, 20)]
    for message in asked:
        p.send(message, D)
    assert [await inboxes[D].get() for _ in asked] == asked
    answer = Grant("r", 1, D, P, list(range(3000)), 0, 10)
    assert d.send(answer, P)
    assert await inboxes[P].get() == answer
    p.close()
    d.close()


async def test_published_events_in_pieces(cut: list[ByteProxy], request: pytest.FixtureRequest) -> None:
    piece_bytes = request.node.callspec.params["cut"]
    publisher = EventPublisher(D, lambda: [BlocksCleared()])
    subscriber = EventSubscriber()
    subscriber.add(through(cut, publisher.bind("tcp://127.0.0.1:*"), piece_bytes))
    heard: list[KvEventBatch] = []
    while not heard or heard[-1].events != EVENTS:
        publisher.publish_kv(EVENTS)  # PUB drops what it says before the subscription arrives
        try:
            message = await asyncio.wait_for(subscriber.receive(), 0.2)
        except TimeoutError:
            continue
        assert isinstance(message, KvEventBatch)
        heard.append(message)
    assert all(batch.events == EVENTS and batch.ref == D for batch in heard)
    subscriber.close()
    publisher.close()
