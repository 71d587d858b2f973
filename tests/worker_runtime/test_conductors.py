"""Which Conductors a worker keeps a stream to, and when it lets go of what one of them asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from front_rig import Front
from segue_proto.v1 import worker_pb2

from kvstore.directory import DirectoryUnavailable, MemoryDirectory
from kvstore.directory_members import CONDUCTOR_PREFIX, ConductorEntry, ConductorMembers
from segue.ids import InstanceRef
from segue.manifest import InstanceManifest, Role
from worker_runtime.conductors import Conductors
from worker_runtime.events import Event, GatewayLost
from worker_runtime.rpc_control import ConductorLink
from worker_runtime.toy_engine import ToyEngine

LEASE_MS = 300
GATEWAY = "gateway:1"


class Directory(MemoryDirectory):
    """That can be away."""

    is_away = False

    async def members(self, prefix: str = "") -> dict[str, bytes]:
        if self.is_away:
            raise DirectoryUnavailable("away")
        return await super().members(prefix)


class Rig:
    """Some real Conductors' ends, one worker's set of links, and the events that reach its core."""

    def __init__(self) -> None:
        self.directory = Directory(lambda: 0)
        self.events: list[Event] = []
        self.fronts: list[Front] = []
        self.conductors = Conductors((), self._link, None)
        self._task: asyncio.Task[None] | None = None

    def follow(self, *seeds: str) -> None:
        members = ConductorMembers(self.directory, lease_ms=LEASE_MS)
        self.conductors = Conductors(seeds, self._link, members)
        self._task = asyncio.create_task(self.conductors.run())

    def _link(self, address: str) -> ConductorLink:
        engine = ToyEngine(4, 4)
        return ConductorLink(
            address,
            _manifest(engine),
            engine.card,
            post=self.events.append,
            resync=lambda _: None,
            on_registered=lambda *_: None,
            on_refused=lambda *_: None,
            steps=lambda: 0,
            is_draining=lambda: False,
            live=list,
            on_drain=lambda: None,
        )

    async def front(self, name: str, address: str = "127.0.0.1:0") -> Front:
        made = Front(name)
        await made.start(address)
        self.fronts.append(made)
        return made

    async def list(self, front: Front) -> None:
        entry = ConductorEntry(name=front.name, grpc=front.address, http="")
        await self.directory.announce(CONDUCTOR_PREFIX + front.name, msgspec.json.encode(entry), 60_000)

    async def unlist(self, front: Front) -> None:
        await self.directory.withdraw(CONDUCTOR_PREFIX + front.name)

    async def assign(self, front: Front) -> None:
        """Something that the worker holds for `front`."""
        await front.registered("w0")
        assign = worker_pb2.Assign(request_id="r", attempt=1, gateway=GATEWAY, token_ids=bytes(4))
        front.workers["w0"].outbox.put_nowait(worker_pb2.ConductorMessage(assign=assign))
        count = len(self.events)
        await until(lambda: len(self.events) > count)

    @property
    def let_go(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, GatewayLost)]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for front in self.fronts:
            await front.close()


def _manifest(engine: ToyEngine) -> InstanceManifest:
    return InstanceManifest(
        ref=InstanceRef("uuid-w0", 1),
        name="w0",
        role=Role.DECODE,
        host="",
        pid=1,
        model="toy",
        card_digest=engine.card.digest,
        kv_root=engine.kv_root.hex(),
        layout=engine.layout,
        pages_total=4,
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        control_address="",
        events_address="",
    )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def for_a_while() -> None:
    """Some rounds of the directory and of the worker's own look."""
    await asyncio.sleep(1.5)


async def test_a_conductor_that_the_directory_names_is_dialled(rig: Rig) -> None:
    rig.follow()
    front = await rig.front("c1")
    await rig.list(front)
    await front.registered("w0")


async def test_one_that_is_gone_for_both_directory_and_stream_is_forgotten(rig: Rig) -> None:
    front = await rig.front("c1")
    await rig.list(front)
    rig.follow()
    await rig.assign(front)
    await front.close()
    await rig.unlist(front)
    await until(lambda: rig.let_go)
    assert rig.let_go == [GatewayLost(GATEWAY)]
    assert rig.conductors.links == {}


async def test_a_seed_that_is_gone_is_let_go_of_and_dialled_again(rig: Rig) -> None:
    front = await rig.front("c1")
    rig.follow(front.address)
    await rig.assign(front)
    await front.close()
    await until(lambda: rig.let_go)
    back = await rig.front("c2", front.address)
    await back.registered("w0")


async def test_one_whose_stream_stands_stays_although_the_directory_lost_its_name(rig: Rig) -> None:
    front = await rig.front("c1")
    await rig.list(front)
    rig.follow()
    await rig.assign(front)
    await rig.unlist(front)
    await for_a_while()
    assert list(rig.conductors.links) == [front.address]
    assert rig.let_go == []


async def test_nobody_is_forgotten_while_the_directory_is_away(rig: Rig) -> None:
    front = await rig.front("c1")
    await rig.list(front)
    rig.follow()
    await rig.assign(front)
    rig.directory.is_away = True
    await front.close()
    await rig.unlist(front)
    await for_a_while()
    assert rig.let_go == []
    rig.directory.is_away = False
    await until(lambda: rig.let_go)


async def test_a_conductor_started_again_at_its_address_ends_what_the_last_one_asked_for(rig: Rig) -> None:
    front = await rig.front("c1")
    rig.directory.is_away = True
    rig.follow(front.address)
    await rig.assign(front)
    await front.close()
    again = await rig.front("c2", front.address)
    await again.registered("w0")
    await until(lambda: rig.let_go)


async def test_a_stream_that_broke_and_came_back_to_the_same_conductor_ends_nothing(rig: Rig) -> None:
    front = await rig.front("c1")
    rig.directory.is_away = True
    rig.follow(front.address)
    await rig.assign(front)
    await front.close()
    await for_a_while()
    again = await rig.front("c1", front.address)
    await rig.assign(again)
    assert rig.let_go == []


async def test_of_two_addresses_of_one_conductor_the_listed_one_is_kept(rig: Rig) -> None:
    """A seed may be a name of the same server: it takes one stream of an instance only."""
    front = await rig.front("c1")
    seed = front.address.replace("127.0.0.1", "localhost")
    rig.follow(seed)
    await front.registered("w0")
    await rig.list(front)
    await until(lambda: list(rig.conductors.links) == [front.address])
