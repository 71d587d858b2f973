"""The directory in Redis, shared by several Conductors and kept over their restarts.

Keys: `<cluster>:member:<name>` (value, PX), `<cluster>:lease:<name>` ("<token> <holder>", PX), `<cluster>:token:<name>`
(a counter that is never deleted: fencing tokens must not start over), `<cluster>:agreed:<name>` (value).
Compare-and-set is WATCH / MULTI, which needs no scripting; a lease is contended rarely, by a handful of Conductors.
"""

from __future__ import annotations

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from kvstore.directory import DirectoryUnavailable, Lease
from kvstore.directory_client_redis import reachable
from kvstore.directory_tenants_redis import RedisTenants
from segue.config import TenantLimits

SCAN_COUNT = 512
AGREED_MS = 24 * 3600 * 1000
"""A value that no member has asked for during a day belongs to a cluster that is no more."""

TRANSACTION_TRIES_MAX = 8
"""Lost races in a row before the directory counts as unavailable: with a handful of contenders somebody is spinning."""


class RedisDirectory:
    """`redis` answers bytes (decode_responses off) and ends with the directory. `cluster` keeps clusters apart."""

    def __init__(self, redis: Redis, cluster: str) -> None:
        self._redis = redis
        self._cluster = cluster

    async def announce(self, name: str, value: bytes, lease_ms: int) -> None:
        _positive(lease_ms)
        async with reachable():
            await self._redis.set(self._key("member", name), value, px=lease_ms)

    async def withdraw(self, name: str) -> None:
        async with reachable():
            await self._redis.delete(self._key("member", name))

    async def members(self, prefix: str = "") -> dict[str, bytes]:
        root = self._key("member", "")
        async with reachable():
            pattern = _escape(root + prefix) + "*"
            keys = sorted({key async for key in self._redis.scan_iter(match=pattern, count=SCAN_COUNT)})
            values = await self._redis.mget(keys) if keys else []
        found = zip(keys, values, strict=True)
        return {key.decode().removeprefix(root): value for key, value in found if isinstance(value, bytes)}

    async def acquire(self, name: str, holder: str, lease_ms: int) -> Lease | None:
        _positive(lease_ms)
        key = self._key("lease", name)
        async with reachable():
            for _ in range(TRANSACTION_TRIES_MAX):
                async with self._redis.pipeline() as pipe:
                    await pipe.watch(key)
                    held = _lease(name, await pipe.get(key))
                    if held is not None and held.holder != holder:
                        return None
                    token = held.token if held else int(await self._redis.incr(self._key("token", name)))
                    lease = Lease(name=name, holder=holder, token=token)
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.set(key, _text(lease), px=lease_ms)
                    if await _executed(pipe):
                        return lease
        raise DirectoryUnavailable(f"lease {name} changed hands {TRANSACTION_TRIES_MAX} times in a row")

    async def renew(self, lease: Lease, lease_ms: int) -> bool:
        _positive(lease_ms)
        key = self._key("lease", lease.name)
        async with reachable(), self._redis.pipeline() as pipe:
            await pipe.watch(key)
            if _lease(lease.name, await pipe.get(key)) != lease:
                return False
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.pexpire(key, lease_ms)
            return await _executed(pipe)

    async def release(self, lease: Lease) -> None:
        key = self._key("lease", lease.name)
        async with reachable(), self._redis.pipeline() as pipe:
            await pipe.watch(key)
            if _lease(lease.name, await pipe.get(key)) == lease:
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.delete(key)
                await _executed(pipe)

    async def agree(self, name: str, value: bytes) -> bytes:
        key = self._key("agreed", name)
        async with reachable():
            await self._redis.set(key, value, nx=True)
            agreed = await self._redis.getex(key, px=AGREED_MS)
        return agreed if isinstance(agreed, bytes) else value

    def shared_tenants(self, limits: TenantLimits) -> RedisTenants:
        return RedisTenants(self._redis, self._cluster, limits)

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, kind: str, name: str) -> str:
        return f"{self._cluster}:{kind}:{name}"


async def _executed(pipe: Pipeline) -> bool:
    """False when a watched key changed: nothing was done."""
    try:
        await pipe.execute()
    except exceptions.WatchError:
        return False
    return True


def _text(lease: Lease) -> str:
    return f"{lease.token} {lease.holder}"


def _lease(name: str, text: bytes | str | None) -> Lease | None:
    if text is None:
        return None
    token, _, holder = (text.decode() if isinstance(text, bytes) else text).partition(" ")
    return Lease(name=name, holder=holder, token=int(token))


def _escape(pattern: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in pattern)


def _positive(lease_ms: int) -> None:
    if lease_ms <= 0:
        raise ValueError(f"lease_ms is {lease_ms}, must be positive")
