"""An instance among processes of another wire version: refused with both versions, at once, and nothing is misread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from conductor.gateway.rpc_tokens import TokenLinkService
from kvstore.connectors.control_zmq import routing_id
from segue.handoff_messages import ForeignHello, Hello, MalformedMessage, decode_message
from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from segue.wire_version import WIRE_VERSION
from segue.worker_messages import Peer, TokenDelta
from worker_runtime import rpc_tokens
from worker_runtime.events import Event, GatewayLost, LinkRefused
from worker_runtime.peer_connections import PeerConnections

ME, STRANGER = InstanceRef("me", 1), InstanceRef("stranger", 7)
FOREIGN_HELLO = msgspec.msgpack.encode(
    ["hello", ["stranger", 7], {"name": "stranger-0", "wire_version": 99, "layout": "of another shape"}, 5, b"more"]
)


class Untouched:
    """A mover that no foreign peer may reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the mover was asked to {name}")


def manifest() -> InstanceManifest:
    return InstanceManifest(
        ref=ME,
        name="me-0",
        role=Role.PREFILL,
        host="host",
        pid=1,
        model="toy",
        card_digest="card",
        kv_root="aa",
        layout=KvLayout(layers=2, kv_heads=1, head_dim=4, block_size=16, dtype="float32"),
        pages_total=64,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        control_address="",
        events_address="",
    )


@asynccontextmanager
async def connections() -> AsyncIterator[tuple[PeerConnections, asyncio.Queue[Event]]]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    made = PeerConnections(ME, Untouched(), events.put_nowait)  # type: ignore[arg-type]
    made.manifest = manifest()
    try:
        yield made, events
    finally:
        made.close()


@asynccontextmanager
async def foreign_socket(kind: int) -> AsyncIterator[zmq.asyncio.Socket]:
    """Of a process that does not share our code."""
    with zmq.asyncio.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


async def test_source_of_another_version_is_told_why_it_is_refused() -> None:
    async with connections() as (peers, events), foreign_socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, routing_id(STRANGER))
        socket.connect(peers.channel.listen("tcp://127.0.0.1:*"))
        await socket.send(FOREIGN_HELLO)
        answer = decode_message(await asyncio.wait_for(socket.recv(), 30))
        assert isinstance(answer, Hello)
        assert answer.refusal == f"wire version differs: stranger-0 has 99, me-0 has {WIRE_VERSION}"
        assert answer.offers == []
        assert events.empty()


async def test_target_of_another_version_is_not_used() -> None:
    async with connections() as (peers, events), foreign_socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        peers.open(Peer(ref=STRANGER, name="stranger-0", control_address=f"tcp://127.0.0.1:{port}"))
        who, _ = await asyncio.wait_for(socket.recv_multipart(), 30)
        await socket.send_multipart([who, FOREIGN_HELLO])
        reason = f"wire version differs: me-0 has {WIRE_VERSION}, stranger-0 has 99"
        assert await asyncio.wait_for(events.get(), 30) == LinkRefused(STRANGER, reason)


async def test_gateway_of_another_version_is_lost_at_once_and_the_reason_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It will not have changed its mind after a lease."""
    monkeypatch.setattr(rpc_tokens, "WIRE_VERSION", 99)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((TokenLinkService(None).handlers(),))  # type: ignore[arg-type]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    events: asyncio.Queue[Event] = asyncio.Queue()
    streams = rpc_tokens.TokenStreams(ME, "me-0", 3600.0, events.put_nowait)
    streams.push(address, [TokenDelta(request_id="r", attempt=1, position=0, token_ids=[1])])
    assert await asyncio.wait_for(events.get(), 30) == GatewayLost(address)
    assert f"wire version differs: the Conductor has {WIRE_VERSION}, the instance has 99" in caplog.text
    await streams.close()
    await server.stop(0)


def test_hello_of_another_version_is_read_as_far_as_its_version() -> None:
    hello = decode_message(FOREIGN_HELLO)
    assert isinstance(hello, ForeignHello)
    assert (hello.source, hello.manifest.name, hello.manifest.wire_version) == (STRANGER, "stranger-0", 99)


def test_malformed_hello_of_this_version_is_malformed() -> None:
    raw = msgspec.msgpack.encode(["hello", ["stranger", 7], {"name": "x", "wire_version": WIRE_VERSION}])
    with pytest.raises(MalformedMessage):
        decode_message(raw)
