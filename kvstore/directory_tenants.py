"""What tenants use, against what they may: requests at once, and tokens per minute.

Tokens are a bucket that holds one minute's worth and refills evenly. It is kept as one number, the time at which it
will be full again; each token moves that time by a minute / limit. A prompt must fit into what is there; generated
tokens are charged as they come and may overdraw it, which the next request waits for. So no guess of the output's
length is needed, and `retry_after` is exact.

`TenantLedger` is pure and counts for one process. Several Conductors share one count through `SharedTenants`
(`directory_tenants_redis`), each keeping a ledger of its own requests to go on with while that is away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from segue.config import TenantLimits
from segue.limits import TENANTS_TRACKED_MAX

WINDOW_US = 60_000_000

RETRY_AFTER_MS_REQUESTS = 1000
"""When one of a tenant's requests will end is not known."""

REQUESTS, TOKENS, TENANTS = "tenant_requests", "tenant_tokens", "tenants"
"""Resources, as a client is told them."""


class TenantRefusal(msgspec.Struct, frozen=True, kw_only=True):
    resource: str
    used: int
    """Requests that are live, or tokens of this minute that are spent."""
    retry_after_ms: int


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """What one Conductor has to say about its requests since it last did."""

    released: Sequence[tuple[str, str]] = ()
    """(tenant, key) of requests that ended."""
    charged: Mapping[str, int] = {}
    """Generated tokens by tenant."""
    live: Mapping[str, Sequence[str]] = {}
    """Keys of all live requests by tenant: they hold their places for another lease."""


class SharedTenants(Protocol):
    """One count over all Conductors. Every call may raise DirectoryUnavailable, and may be repeated."""

    async def admit(self, tenant: str, key: str, tokens: int, lease_ms: int) -> TenantRefusal | None:
        """Take a place for `key` and charge `tokens`, or say why not. A key that has its place keeps it, uncharged."""

    async def settle(self, settlement: Settlement, lease_ms: int) -> None: ...


class _Tenant:
    __slots__ = ("full_us", "live")

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.full_us = 0


class TenantLedger:
    """Pure; times are microseconds of the caller's clock. Tenants that use nothing are forgotten."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}

    def admit(self, now_us: int, tenant: str, key: str, tokens: int) -> TenantRefusal | None:
        """`tokens` is at most the limit per minute: more could never be admitted."""
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= TENANTS_TRACKED_MAX and not self._forget_idle(now_us):
                used = len(self._tenants)
                return TenantRefusal(resource=TENANTS, used=used, retry_after_ms=RETRY_AFTER_MS_REQUESTS)
            found = _Tenant()
        refusal = self._refusal(found, now_us, tokens)
        if refusal is None:
            self._tenants[tenant] = found
            found.live.add(key)
            found.full_us = self._full_us(found, now_us, tokens)
        return refusal

    def release(self, now_us: int, tenant: str, key: str, *, refund: int = 0) -> None:
        """Idempotent, but for the refund: of tokens charged for a request that was refused after all."""
        found = self._tenants.get(tenant)
        if found is None:
            return
        found.live.discard(key)
        found.full_us -= self._cost_us(refund)
        if not found.live and found.full_us <= now_us:
            del self._tenants[tenant]

    def charge(self, now_us: int, tenant: str, tokens: int) -> None:
        found = self._tenants.setdefault(tenant, _Tenant())
        found.full_us = self._full_us(found, now_us, tokens)

    def __len__(self) -> int:
        return len(self._tenants)

    def _refusal(self, found: _Tenant, now_us: int, tokens: int) -> TenantRefusal | None:
        requests_max, per_minute = self._limits.requests_max, self._limits.tokens_per_minute
        if requests_max and len(found.live) >= requests_max:
            used = len(found.live)
            return TenantRefusal(resource=REQUESTS, used=used, retry_after_ms=RETRY_AFTER_MS_REQUESTS)
        late_us = self._full_us(found, now_us, tokens) - now_us - WINDOW_US
        if not per_minute or late_us <= 0:
            return None
        spent = (max(found.full_us, now_us) - now_us) * per_minute // WINDOW_US
        return TenantRefusal(resource=TOKENS, used=spent, retry_after_ms=-(-late_us // 1000))

    def _full_us(self, found: _Tenant, now_us: int, tokens: int) -> int:
        return max(found.full_us, now_us) + self._cost_us(tokens)

    def _cost_us(self, tokens: int) -> int:
        per_minute = self._limits.tokens_per_minute
        return tokens * WINDOW_US // per_minute if per_minute else 0

    def _forget_idle(self, now_us: int) -> bool:
        self._tenants = {name: kept for name, kept in self._tenants.items() if kept.live or kept.full_us > now_us}
        return len(self._tenants) < TENANTS_TRACKED_MAX
