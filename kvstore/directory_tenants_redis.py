"""Tenants' use, counted in Redis over all Conductors. The arithmetic is that of `directory_tenants.TenantLedger`.

Keys: `<cluster>:tenant-live:<tenant>` (sorted set of request keys, scored by when their lease ends) and
`<cluster>:tenant-full:<tenant>` (when the token bucket will be full, and until then). A Conductor that dies says
nothing more about its requests: their leases end. Scripts, because a place must be looked for and taken in one piece by
many at once; times are those of the server's clock.
"""

from __future__ import annotations

from redis.asyncio import Redis

from kvstore.directory_client_redis import reachable
from kvstore.directory_tenants import (
    REQUESTS,
    RETRY_AFTER_MS_REQUESTS,
    TOKENS,
    WINDOW_US,
    Settlement,
    TenantRefusal,
)
from segue.config import TenantLimits

_CLOCK = """
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local function charge(key, tokens, per_minute)
  if per_minute == 0 or tokens == 0 then return end
  local full_us = math.max(tonumber(redis.call('GET', key) or 0), now_us)
  full_us = full_us + math.floor(tokens * WINDOW_US / per_minute)
  redis.call('SET', key, string.format('%.0f', full_us), 'PX', math.ceil((full_us - now_us) / 1000))
end
local function hold(key, lease_us, first)
  for at = first, #ARGV do redis.call('ZADD', key, string.format('%.0f', now_us + lease_us), ARGV[at]) end
  redis.call('PEXPIRE', key, math.ceil(lease_us / 1000))
end
""".replace("WINDOW_US", str(WINDOW_US))

_ADMIT = (
    _CLOCK
    + """
local requests_max, per_minute = tonumber(ARGV[1]), tonumber(ARGV[2])
local tokens, lease_us = tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('ZSCORE', KEYS[1], ARGV[5]) then return {0, 0, 0} end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_us))
local live = redis.call('ZCARD', KEYS[1])
if requests_max > 0 and live >= requests_max then return {1, live, 0} end
if per_minute > 0 then
  local debt_us = math.max(tonumber(redis.call('GET', KEYS[2]) or 0) - now_us, 0)
  local late_us = debt_us + math.floor(tokens * WINDOW_US / per_minute) - WINDOW_US
  if late_us > 0 then return {2, math.floor(debt_us * per_minute / WINDOW_US), math.ceil(late_us / 1000)} end
end
charge(KEYS[2], tokens, per_minute)
hold(KEYS[1], lease_us, 5)
return {0, 0, 0}
""".replace("WINDOW_US", str(WINDOW_US))
)

_CHARGE = _CLOCK + "charge(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]))"
_HOLD = _CLOCK + "hold(KEYS[1], tonumber(ARGV[1]), 2)"


class RedisTenants:
    """`redis` belongs to the caller. `cluster` keeps clusters apart; all of its Conductors have the same `limits`."""

    def __init__(self, redis: Redis, cluster: str, limits: TenantLimits) -> None:
        self._redis = redis
        self._cluster = cluster
        self._limits = limits
        self._admit = redis.register_script(_ADMIT)
        self._charge = redis.register_script(_CHARGE)
        self._hold = redis.register_script(_HOLD)

    async def admit(self, tenant: str, key: str, tokens: int, lease_ms: int) -> TenantRefusal | None:
        limits = self._limits
        words: list[str | int] = [limits.requests_max, limits.tokens_per_minute, tokens, lease_ms * 1000, key]
        async with reachable():
            verdict, used, retry_ms = await self._admit([self._live(tenant), self._full(tenant)], words)
        if verdict == 0:
            return None
        if verdict == 1:
            return TenantRefusal(resource=REQUESTS, used=used, retry_after_ms=RETRY_AFTER_MS_REQUESTS)
        return TenantRefusal(resource=TOKENS, used=used, retry_after_ms=retry_ms)

    async def settle(self, settlement: Settlement, lease_ms: int) -> None:
        """All of it or nothing. Only when an answer is lost on its way may tokens be charged twice, for a minute."""
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            for tenant, key in settlement.released:
                pipe.zrem(self._live(tenant), key)
            for tenant, tokens in settlement.charged.items():
                await self._charge([self._full(tenant)], [tokens, self._limits.tokens_per_minute], client=pipe)
            for tenant, keys in settlement.live.items():
                words: list[str | int] = [lease_ms * 1000, *keys]
                await self._hold([self._live(tenant)], words, client=pipe)
            await pipe.execute()

    def _live(self, tenant: str) -> str:
        return f"{self._cluster}:tenant-live:{tenant}"

    def _full(self, tenant: str) -> str:
        return f"{self._cluster}:tenant-full:{tenant}"
