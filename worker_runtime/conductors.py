"""The Conductors of one worker: those it was told of, and those that the directory names, each on a stream of its own.

A Conductor is gone when its stream is broken and a directory that answers does not name it. Both together: a directory
that lost its data names nobody, and one that is away says nothing, while the streams go on. What only that Conductor
wanted is then let go at once, instead of after the leases of the gateway and of the hand-offs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from kvstore.directory_members import ConductorEntry, ConductorMembers
from segue.limits import CONDUCTORS_MAX
from worker_runtime.rpc_control import ConductorLink

log = logging.getLogger(__name__)

LOOK_S = 0.5


class Conductors:
    """`links` by address, for whoever reports to a Conductor. `seeds` are dialled again whatever the directory says;
    `members` is None where there is no directory beside them."""

    def __init__(
        self, seeds: Sequence[str], make_link: Callable[[str], ConductorLink], members: ConductorMembers | None
    ) -> None:
        self._seeds = tuple(seeds)
        self._make_link = make_link
        self._members = members
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.links: dict[str, ConductorLink] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._seeds:
                self._dial(group, address)
            if self._members is not None:
                group.create_task(self._members.run(), name="directory members")
            while True:
                if self._members is not None:
                    self._follow(group, self._members)
                await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        if self._members is not None:
            await self._members.close()

    def _follow(self, group: asyncio.TaskGroup, members: ConductorMembers) -> None:
        """Dial who is new, let go of who is gone. Nobody is gone while the directory is away."""
        listed = {entry.grpc for entry in members.entries.values()}
        for address in sorted(listed):
            if address not in self.links:
                self._dial(group, address)
        for link in list(self.links.values()):
            if _has_another_address(link, members.entries):
                self._drop(link)
            elif members.is_up and not link.is_registered and link.address not in listed:
                if link.identity:
                    log.warning("conductor %s is gone: what it asked for is let go", link.address)
                link.forget()
                if link.address not in self._seeds:
                    self._drop(link)

    def _dial(self, group: asyncio.TaskGroup, address: str) -> None:
        if len(self.links) >= CONDUCTORS_MAX:
            log.error("conductor %s is not dialled: %d are", address, CONDUCTORS_MAX)
            return
        link = self.links[address] = self._make_link(address)
        self._tasks[address] = group.create_task(link.run(), name=f"conductor {address}")

    def _drop(self, link: ConductorLink) -> None:
        del self.links[link.address]
        self._tasks.pop(link.address).cancel()


def _has_another_address(link: ConductorLink, entries: Mapping[str, ConductorEntry]) -> bool:
    """A seed may be a second name of a Conductor, which takes one stream of an instance: the listed address stays."""
    entry = entries.get(link.identity)
    return entry is not None and entry.grpc != link.address
