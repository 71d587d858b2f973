"""Token streams against a real gRPC server: a gateway that stays away for a lease is lost, once."""

from __future__ import annotations

import asyncio

from front_rig import Front

from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import TokenDelta
from worker_runtime.events import Event, GatewayLost
from worker_runtime.rpc_tokens import TokenStreams

REF = InstanceRef("d", 1)


def delta(position: int, request_id: str = "r") -> TokenDelta:
    return TokenDelta(request_id=request_id, attempt=1, position=position, token_ids=[position])


async def test_gateway_that_stays_away_is_lost_once() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    streams = TokenStreams(REF, "decode-0", 0.2, events.put_nowait)
    streams.push("127.0.0.1:1", [delta(0)])
    assert await asyncio.wait_for(events.get(), 30) == GatewayLost("127.0.0.1:1")
    await streams.close()
    assert events.empty()


async def test_tokens_said_while_the_gateway_is_away_arrive_when_it_returns() -> None:
    front = Front()
    await front.start()
    address = front.address
    await front.close()
    events: asyncio.Queue[Event] = asyncio.Queue()
    streams = TokenStreams(REF, "decode-0", 60.0, events.put_nowait)
    for position in range(5):
        streams.push(address, [delta(position)])
    await asyncio.sleep(0.2)
    returned = Front()
    await returned.start(address)
    await returned.until(lambda: len(returned.deltas[AttemptRef("r", 1)]) == 5)
    assert returned.generated(AttemptRef("r", 1)) == [0, 1, 2, 3, 4]
    await streams.close()
    await returned.close()
    assert events.empty()


async def test_what_is_said_after_a_gateway_came_back_reaches_the_new_one() -> None:
    """Not the writer of a broken stream, which has waited for the next batch ever since."""
    front = Front()
    await front.start()
    address = front.address
    streams = TokenStreams(REF, "prefill-0", 60.0, lambda event: None)
    streams.push(address, [delta(0)])
    async with asyncio.timeout(30):
        while not streams.is_delivered:
            await asyncio.sleep(0.01)
    await front.close()
    returned = Front()
    await returned.start(address)
    await returned.until(lambda: returned.token_streams == 1)
    for position in range(3):
        streams.push(address, [delta(position, "s")])
        await returned.until(lambda end=position + 1: len(returned.deltas[AttemptRef("s", 1)]) == end)
    await streams.close()
    await returned.close()
