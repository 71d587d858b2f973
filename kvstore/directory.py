"""The directory of a cluster: who is a member, and who holds which lease, across Conductors and restarts.

Members announce themselves under a name, for a limited time, and renew; a name that is not renewed disappears. A lease
gives one holder at a time the right to do something, with a fencing token that grows with every change of holder, so
that what a former holder still does can be told apart. Times are durations on the directory's own clock.

`MemoryDirectory` is the embedded one of a single Conductor; `directory_redis.RedisDirectory` is shared by several.
Neither is ever on the path of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvstore.directory_tenants import SharedTenants
from segue.config import TenantLimits
from segue.errors import SegueError
from segue.limits import INSTANCES_MAX

NAMES_MAX = 16 * INSTANCES_MAX
"""Members and leases of one cluster; an embedded directory refuses more instead of growing."""


class DirectoryFull(SegueError):
    """NAMES_MAX names are in use."""


class DirectoryUnavailable(SegueError):
    """The directory cannot be reached. Membership goes on from memory; the caller tries again."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    holder: str
    token: int
    """Grows by one with every change of holder; never reused for a name."""


class Directory(Protocol):
    """`lease_ms` is positive. Every call may raise DirectoryUnavailable."""

    async def announce(self, name: str, value: bytes, lease_ms: int) -> None:
        """Make `name` a member with `value`, or renew it; the newest value counts."""

    async def withdraw(self, name: str) -> None:
        """Idempotent."""

    async def members(self, prefix: str = "") -> dict[str, bytes]:
        """Live members whose names start with `prefix`, by name."""

    async def acquire(self, name: str, holder: str, lease_ms: int) -> Lease | None:
        """None while somebody else holds it. A holder that asks again gets its own lease, renewed."""

    async def renew(self, lease: Lease, lease_ms: int) -> bool:
        """False when it is lost: it ran out, even if nobody took it."""

    async def release(self, lease: Lease) -> None:
        """Idempotent; of a lost lease, nothing."""

    async def agree(self, name: str, value: bytes) -> bytes:
        """What all members share under `name`: the first value proposed. It lasts while somebody asks for it."""

    def shared_tenants(self, limits: TenantLimits) -> SharedTenants | None:
        """The count over all Conductors; None where there is only one, which counts by itself."""

    async def close(self) -> None:
        """Nothing is withdrawn: what was announced ends with its lease."""


class _Entry(msgspec.Struct):
    expires_us: int
    value: bytes = b""
    lease: Lease | None = None


class MemoryDirectory:
    """In this process; gone with it. `clock_us` is a monotonic clock in microseconds."""

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._members: dict[str, _Entry] = {}
        self._leases: dict[str, _Entry] = {}
        self._tokens: dict[str, int] = {}
        self._agreed: dict[str, bytes] = {}

    async def announce(self, name: str, value: bytes, lease_ms: int) -> None:
        """Raises DirectoryFull."""
        self._make_room(self._members, name)
        self._members[name] = _Entry(expires_us=self._expiry(lease_ms), value=value)

    async def withdraw(self, name: str) -> None:
        self._members.pop(name, None)

    async def members(self, prefix: str = "") -> dict[str, bytes]:
        now_us = self._clock_us()
        return {
            name: entry.value
            for name, entry in sorted(self._members.items())
            if name.startswith(prefix) and entry.expires_us > now_us
        }

    async def acquire(self, name: str, holder: str, lease_ms: int) -> Lease | None:
        """Raises DirectoryFull."""
        held = self._held(name)
        if held is not None and held.holder != holder:
            return None
        if held is None:
            self._make_room(self._tokens, name)
            self._tokens[name] = self._tokens.get(name, 0) + 1
            held = Lease(name=name, holder=holder, token=self._tokens[name])
        self._leases[name] = _Entry(expires_us=self._expiry(lease_ms), lease=held)
        return held

    async def renew(self, lease: Lease, lease_ms: int) -> bool:
        if self._held(lease.name) != lease:
            return False
        self._leases[lease.name].expires_us = self._expiry(lease_ms)
        return True

    async def release(self, lease: Lease) -> None:
        if self._held(lease.name) == lease:
            del self._leases[lease.name]

    async def agree(self, name: str, value: bytes) -> bytes:
        """`name` is one of the program's own, so there are few."""
        return self._agreed.setdefault(name, value)

    def shared_tenants(self, limits: TenantLimits) -> None:
        return None

    async def close(self) -> None:
        pass

    def _held(self, name: str) -> Lease | None:
        entry = self._leases.get(name)
        return entry.lease if entry is not None and entry.expires_us > self._clock_us() else None

    def _expiry(self, lease_ms: int) -> int:
        if lease_ms <= 0:
            raise ValueError(f"lease_ms is {lease_ms}, must be positive")
        return self._clock_us() + lease_ms * 1000

    def _make_room(self, names: dict[str, _Entry] | dict[str, int], name: str) -> None:
        if name in names or len(names) < NAMES_MAX:
            return
        now_us = self._clock_us()
        self._members = {key: entry for key, entry in self._members.items() if entry.expires_us > now_us}
        if names is self._tokens or len(self._members) >= NAMES_MAX:
            raise DirectoryFull(f"{NAMES_MAX} names are in use")
