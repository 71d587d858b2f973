"""An address leads to another instance than the one that was planned: refused by whom it leads to, with the reason."""

from __future__ import annotations

import asyncio

from test_foreign_versions import ME, STRANGER, Untouched, connections, manifest

from segue.ids import InstanceRef, absence
from segue.worker_messages import Peer
from worker_runtime.events import Event, LinkRefused, PeerGone
from worker_runtime.peer_connections import PeerConnections

GONE = InstanceRef("stranger", 6)


class Forgetting(Untouched):
    """A mover that is only told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[InstanceRef] = []

    def forget(self, peer: InstanceRef) -> None:
        self.forgotten.append(peer)


async def test_instance_that_was_not_meant_refuses_and_says_who_it_is() -> None:
    other = PeerConnections(STRANGER, Untouched(), lambda event: None)  # type: ignore[arg-type]
    other.manifest = manifest()
    address = other.channel.listen("tcp://127.0.0.1:*")
    async with connections() as (peers, events):
        peers.open(Peer(ref=GONE, name="stranger-0", control_address=address))
        refused = await asyncio.wait_for(events.get(), 9.0)  # sooner than an address where nobody answers
        assert refused == LinkRefused(GONE, absence(GONE, STRANGER))
    other.close()


async def test_who_was_at_an_address_before_is_parted_with_when_another_is_dialled_there() -> None:
    """Both connections would carry our name, and the router at the other end keeps only one of a name."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    mover = Forgetting()
    peers = PeerConnections(ME, mover, events.put_nowait)  # type: ignore[arg-type]
    peers.manifest = manifest()
    for ref in (InstanceRef("other", 1), InstanceRef("another", 1)):
        peers.open(Peer(ref=ref, name=ref.uuid, control_address="tcp://127.0.0.1:1"))
    assert await asyncio.wait_for(events.get(), 30) == PeerGone(InstanceRef("other", 1))
    assert mover.forgotten == [InstanceRef("other", 1)]
    peers.close()


async def test_earlier_incarnation_is_parted_with_wherever_it_was() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    peers = PeerConnections(ME, Forgetting(), events.put_nowait)  # type: ignore[arg-type]
    peers.manifest = manifest()
    for ref, port in ((GONE, 1), (STRANGER, 2)):
        peers.open(Peer(ref=ref, name=ref.uuid, control_address=f"tcp://127.0.0.1:{port}"))
    assert await asyncio.wait_for(events.get(), 30) == PeerGone(GONE)
    peers.close()
