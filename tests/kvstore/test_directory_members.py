"""Who a process believes to be a Conductor, when the directory answers and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from redis_server import RedisServer

from kvstore.directory import MemoryDirectory
from kvstore.directory_client_redis import connect
from kvstore.directory_members import CONDUCTOR_PREFIX, ConductorEntry, ConductorMembers
from kvstore.directory_redis import RedisDirectory

LEASE_MS = 600


def entry(name: str) -> ConductorEntry:
    return ConductorEntry(name=name, grpc=f"{name}:1", http=f"{name}:2")


def members_at(server: RedisServer, own: str = "") -> ConductorMembers:
    members = ConductorMembers(RedisDirectory(connect(server.url), "test"), lease_ms=LEASE_MS)
    members.own = entry(own) if own else None
    return members


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_each_learns_of_the_others_and_of_their_end() -> None:
    now_us = [0]
    directory = MemoryDirectory(lambda: now_us[0])
    seen: list[Mapping[str, ConductorEntry]] = []
    one = ConductorMembers(directory, lease_ms=LEASE_MS)
    two = ConductorMembers(directory, lease_ms=LEASE_MS, changed=seen.append)
    one.own = entry("a")
    await one.refresh()
    await two.refresh()
    await two.refresh()
    now_us[0] += LEASE_MS * 1000 + 1
    await two.refresh()
    assert seen == [{"a": entry("a")}, {}]


async def test_a_member_that_withdraws_is_gone_at_once() -> None:
    directory = MemoryDirectory(lambda: 0)
    members = ConductorMembers(directory, lease_ms=LEASE_MS)
    members.own = entry("a")
    await members.refresh()
    await members.withdraw()
    members.own = None
    await members.refresh()
    assert members.entries == {}


async def test_what_another_program_wrote_is_no_member() -> None:
    directory = MemoryDirectory(lambda: 0)
    await directory.announce(CONDUCTOR_PREFIX + "odd", b"\xff{", LEASE_MS)
    members = ConductorMembers(directory, lease_ms=LEASE_MS)
    assert await members.refresh()
    assert members.entries == {}


async def test_membership_outlives_a_directory_that_lost_everything(redis_alone: RedisServer) -> None:
    """Stopped: nobody is forgotten. Back and empty: both announce themselves again, and nobody was missing for long."""
    one, two = members_at(redis_alone, "a"), members_at(redis_alone, "b")
    tasks = [asyncio.create_task(members.run()) for members in (one, two)]
    await until(lambda: len(one.entries) == len(two.entries) == 2)
    redis_alone.stop()
    await until(lambda: not one.is_up and not two.is_up)
    assert len(one.entries) == len(two.entries) == 2
    await asyncio.sleep(2 * LEASE_MS / 1000)
    assert len(one.entries) == len(two.entries) == 2, "longer away than a lease lasts"
    redis_alone.start()
    await until(lambda: one.is_up and two.is_up and len(one.entries) == len(two.entries) == 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for members in (one, two):
        await members.close()
