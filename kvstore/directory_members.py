"""Conductors as the directory knows them, kept up to date from memory while it is away.

A Conductor announces itself under a lease and renews it three times as often as needed; whoever reads keeps the last
answer. A directory that does not answer says nothing: nobody is forgotten for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from kvstore.directory import Directory, DirectoryFull, DirectoryUnavailable

log = logging.getLogger(__name__)

CONDUCTOR_PREFIX = "conductor/"

RETRY_FIRST_S = 0.1
"""After a failure, doubled up to the usual period."""


class ConductorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is new with every process, `grpc` (host:port) is where workers and other Conductors reach it."""

    name: str
    grpc: str
    http: str


class ConductorMembers:
    """Reads who is there, and announces `own`, if set. `changed` is called with every new answer that differs, by name;
    `also` in every round, and may raise what the directory does."""

    def __init__(
        self,
        directory: Directory,
        *,
        lease_ms: int,
        changed: Callable[[Mapping[str, ConductorEntry]], None] | None = None,
        also: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._directory = directory
        self._lease_ms = lease_ms
        self._changed = changed
        self._also = also
        self._random = random.Random()
        self.own: ConductorEntry | None = None
        self.entries: dict[str, ConductorEntry] = {}
        self.is_up = False
        """Whether the last round was answered."""
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        retry_s = RETRY_FIRST_S
        period_s = self._lease_ms / 3000
        while True:
            if await self.refresh():
                retry_s, wait_s = RETRY_FIRST_S, period_s
            else:
                wait_s = retry_s * self._random.uniform(0.5, 1.0)
                retry_s = min(2 * retry_s, period_s)
            await asyncio.sleep(wait_s)

    async def refresh(self) -> bool:
        """One round; False when the directory did not answer."""
        try:
            if self.own is not None:
                value = msgspec.json.encode(self.own)
                await self._directory.announce(CONDUCTOR_PREFIX + self.own.name, value, self._lease_ms)
            found = await self._directory.members(CONDUCTOR_PREFIX)
            if self._also is not None:
                await self._also()
        except (DirectoryUnavailable, DirectoryFull) as error:
            self._note(error)
            return False
        self._note(None)
        entries = {entry.name: entry for entry in map(_entry, found.values()) if entry is not None}
        if entries != self.entries:
            self.entries = entries
            if self._changed is not None:
                self._changed(entries)
        return True

    async def withdraw(self) -> None:
        """The others need not wait for the lease."""
        if self.own is None:
            return
        try:
            await self._directory.withdraw(CONDUCTOR_PREFIX + self.own.name)
        except DirectoryUnavailable as error:
            log.warning("not withdrawn, the lease ends by itself: %s", error)

    async def close(self) -> None:
        await self._directory.close()

    def _note(self, error: Exception | None) -> None:
        if error is None:
            if self.failures and not self.is_up:
                log.warning("the directory answers again")
            self.is_up = True
            return
        if self.is_up or not self.failures:
            log.error("the directory is away, membership goes on from memory: %s", error)
        self.is_up = False
        self.failures += 1


def _entry(value: bytes) -> ConductorEntry | None:
    """None for what another version, or another program, wrote."""
    try:
        return msgspec.json.decode(value, type=ConductorEntry)
    except msgspec.MsgspecError as error:
        log.warning("a member of the directory is not a Conductor of this version: %s", error)
        return None
