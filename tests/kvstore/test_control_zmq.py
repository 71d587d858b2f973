"""The control channel: messages reach the right incarnation, hostile bytes reach nobody."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.control_zmq import ControlChannel, UnreachableAddress, routing_id
from segue.handoff_messages import (
    Abort,
    Complete,
    ControlMessage,
    Grant,
    GrantRequest,
    Heartbeat,
    MalformedMessage,
    decode_message,
    encode_message,
)
from segue.ids import AttemptRef, InstanceRef

P, D = InstanceRef("p", 1), InstanceRef("d", 2)


class End:
    def __init__(self, ref: InstanceRef) -> None:
        self.inbox: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self.channel = ControlChannel(ref, self.inbox.put_nowait)


async def test_request_and_answer_cross_the_channel(tmp_path: Path) -> None:
    p, d = End(P), End(D)
    p.channel.dial(D, d.channel.listen(f"ipc://{tmp_path}/d"))
    p.channel.send(GrantRequest("r", 1, P, D), D)
    assert await d.inbox.get() == GrantRequest("r", 1, P, D)
    answer = Grant("r", 1, D, P, list(range(5000)), 0, 10)
    assert d.channel.send(answer, P)
    assert await p.inbox.get() == answer
    p.channel.close()
    d.channel.close()


async def test_messages_keep_their_order_over_tcp() -> None:
    p, d = End(P), End(D)
    p.channel.dial(D, d.channel.listen("tcp://127.0.0.1:*"))
    for number in range(500):
        p.channel.send(GrantRequest("r", number, P, D), D)
    got = [await d.inbox.get() for _ in range(500)]
    assert [message.attempt for message in got if isinstance(message, GrantRequest)] == list(range(500))
    p.channel.close()
    d.channel.close()


async def test_answer_to_an_old_incarnation_is_dropped_and_counted(tmp_path: Path) -> None:
    p, d = End(P), End(D)
    p.channel.dial(D, d.channel.listen(f"ipc://{tmp_path}/d"))
    p.channel.send(GrantRequest("r", 1, P, D), D)
    await d.inbox.get()
    older = InstanceRef("p", 0)
    assert not d.channel.send(Complete("r", 1, D, older), older)
    assert d.channel.dropped["unreachable"] == 1
    p.channel.close()
    d.channel.close()


async def test_malformed_and_forged_messages_reach_nobody(tmp_path: Path) -> None:
    d = End(D)
    address = d.channel.listen(f"ipc://{tmp_path}/d")
    context = zmq.Context()
    rogue = context.socket(zmq.DEALER)
    rogue.setsockopt(zmq.ROUTING_ID, routing_id(P))
    rogue.connect(address)
    rogue.send(b"\xc1")
    rogue.send(encode_message(Abort("r", 1, InstanceRef("other", 9), D, "mine")))
    rogue.send(encode_message(Abort("r", 1, P, D, "right")))
    assert await d.inbox.get() == Abort("r", 1, P, D, "right")
    assert d.channel.dropped == {"malformed": 1, "forged source": 1}
    rogue.close()
    context.term()
    d.channel.close()


async def test_address_that_is_none_is_an_error() -> None:
    p = End(P)
    with pytest.raises(UnreachableAddress):
        p.channel.dial(D, "nonsense")
    p.channel.close()


async def test_send_without_a_channel_is_counted() -> None:
    d = End(D)
    assert not d.channel.send(Complete("r", 1, D, P), P)
    assert d.channel.dropped["no channel"] == 1
    d.channel.close()


@given(st.binary(max_size=80))
def test_any_bytes_decode_or_raise_malformed(raw: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        decode_message(raw)


@given(st.integers(0, 60))
def test_truncated_messages_are_malformed(cut: int) -> None:
    raw = encode_message(Heartbeat(P, D, [AttemptRef("request", 3)]))
    if cut < len(raw):
        with contextlib.suppress(MalformedMessage):
            assert decode_message(raw[:cut]) is None


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_connection_that_was_made_anew_is_told_and_the_first_is_not(tmp_path: Path, transport: str) -> None:
    restored: asyncio.Queue[InstanceRef] = asyncio.Queue()
    d = End(D)
    address = d.channel.listen(f"ipc://{tmp_path}/d" if transport == "ipc" else "tcp://127.0.0.1:*")
    p = ControlChannel(P, lambda message: None, restored.put_nowait)
    p.dial(D, address)
    p.send(GrantRequest("r", 1, P, D), D)
    await d.inbox.get()
    d.channel.close()
    again = End(D)
    again.channel.listen(address)
    assert await asyncio.wait_for(restored.get(), 30) == D
    assert restored.empty()
    p.close()
    again.channel.close()
