"""One contract for every count of tenants' use: in a process, and over Conductors in a real Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from kvstore.directory_client_redis import connect
from kvstore.directory_tenants import REQUESTS, TENANTS, TOKENS, WINDOW_US, Settlement, TenantLedger, TenantRefusal
from kvstore.directory_tenants_redis import RedisTenants
from segue.config import TenantLimits
from segue.limits import TENANTS_TRACKED_MAX

LIMITS = TenantLimits(requests_max=3, tokens_per_minute=60)
"""A token a second: milliseconds that really pass do not matter."""

LEASE_MS = 15_000


class Count(Protocol):
    async def admit(self, tenant: str, key: str, tokens: int) -> TenantRefusal | None: ...

    async def charge(self, tenant: str, tokens: int) -> None: ...

    async def release(self, tenant: str, key: str) -> None: ...

    async def pass_s(self, seconds: int) -> None: ...


class Ledger:
    def __init__(self) -> None:
        self._ledger = TenantLedger(LIMITS)
        self._now_us = 1

    async def admit(self, tenant: str, key: str, tokens: int) -> TenantRefusal | None:
        return self._ledger.admit(self._now_us, tenant, key, tokens)

    async def charge(self, tenant: str, tokens: int) -> None:
        self._ledger.charge(self._now_us, tenant, tokens)

    async def release(self, tenant: str, key: str) -> None:
        self._ledger.release(self._now_us, tenant, key)

    async def pass_s(self, seconds: int) -> None:
        self._now_us += seconds * 1_000_000


class Shared:
    """Time passes by moving what is written in it."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._cluster = f"test-{secrets.token_hex(4)}"
        self.tenants = RedisTenants(redis, self._cluster, LIMITS)

    async def admit(self, tenant: str, key: str, tokens: int) -> TenantRefusal | None:
        return await self.tenants.admit(tenant, key, tokens, LEASE_MS)

    async def charge(self, tenant: str, tokens: int) -> None:
        await self.tenants.settle(Settlement(charged={tenant: tokens}), LEASE_MS)

    async def release(self, tenant: str, key: str) -> None:
        await self.tenants.settle(Settlement(released=[(tenant, key)]), LEASE_MS)

    async def pass_s(self, seconds: int) -> None:
        for key in await self._redis.keys(f"{self._cluster}:tenant-full:*"):
            await self._redis.decrby(key, seconds * 1_000_000)
        for key in await self._redis.keys(f"{self._cluster}:tenant-live:*"):
            for member in await self._redis.zrange(key, 0, -1):
                await self._redis.zincrby(key, -seconds * 1_000_000, member)


@pytest.fixture
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    redis = connect(request.getfixturevalue("redis_server").url)
    yield Shared(redis)
    await redis.aclose()


@pytest.fixture(params=["ledger", "shared"])
def count(request: pytest.FixtureRequest) -> Count:
    found: Count = Ledger() if request.param == "ledger" else request.getfixturevalue("shared")
    return found


async def test_requests_at_once_are_bounded_for_each_tenant(count: Count) -> None:
    for key in ("1", "2", "3"):
        assert await count.admit("a", key, 1) is None
    refusal = await count.admit("a", "4", 1)
    assert refusal is not None
    assert (refusal.resource, refusal.used) == (REQUESTS, 3)
    assert await count.admit("b", "4", 1) is None
    await count.release("a", "2")
    await count.release("a", "2")
    assert await count.admit("a", "4", 1) is None
    assert await count.admit("a", "5", 1) is not None


async def test_a_prompt_waits_until_the_bucket_holds_it(count: Count) -> None:
    assert await count.admit("a", "1", 40) is None
    refusal = await count.admit("a", "2", 30)
    assert refusal is not None
    assert refusal.resource == TOKENS
    assert refusal.used == pytest.approx(40, abs=1)
    assert refusal.retry_after_ms == pytest.approx(10_000, abs=500)
    await count.pass_s(10)
    assert await count.admit("a", "2", 30) is None


async def test_generated_tokens_overdraw_the_bucket_and_the_next_request_waits(count: Count) -> None:
    assert await count.admit("a", "1", 10) is None
    await count.charge("a", 110)
    refusal = await count.admit("a", "2", 0)
    assert refusal is not None
    assert refusal.retry_after_ms == pytest.approx(60_000, abs=500)
    await count.pass_s(61)
    assert await count.admit("a", "2", 0) is None


async def test_a_bucket_never_holds_more_than_a_minute(count: Count) -> None:
    assert await count.admit("a", "1", 1) is None
    await count.pass_s(3600)
    assert await count.admit("a", "2", 60) is None
    refusal = await count.admit("a", "3", 1)
    assert refusal is not None and refusal.resource == TOKENS


async def test_a_refused_request_is_charged_nothing(count: Count) -> None:
    assert await count.admit("a", "1", 50) is None
    for _ in range(3):
        assert await count.admit("a", "2", 20) is not None
    assert await count.admit("a", "2", 9) is None


async def test_places_of_a_conductor_that_says_nothing_more_become_free(shared: Shared) -> None:
    for key in ("dead/1", "dead/2", "alive/1"):
        assert await shared.admit("a", key, 1) is None
    await shared.pass_s(10)
    await shared.tenants.settle(Settlement(live={"a": ["alive/1"]}), LEASE_MS)
    assert await shared.admit("a", "alive/2", 1) is not None
    await shared.pass_s(6)
    assert await shared.admit("a", "alive/2", 1) is None
    assert await shared.admit("a", "alive/3", 1) is None
    refusal = await shared.admit("a", "alive/4", 1)
    assert refusal is not None and refusal.used == 3, "the one that was held again has its place"


async def test_a_call_said_twice_takes_one_place_and_is_charged_once(shared: Shared) -> None:
    """What a lost answer leads to."""
    for _ in range(5):
        assert await shared.admit("a", "1", 25) is None
    assert await shared.admit("a", "2", 25) is None


async def test_many_that_ask_at_once_get_just_the_places_there_are(shared: Shared) -> None:
    answers = await asyncio.gather(*(shared.admit("a", str(number), 1) for number in range(40)))
    assert sum(answer is None for answer in answers) == LIMITS.requests_max


async def test_nothing_of_an_idle_tenant_stays(shared: Shared) -> None:
    assert await shared.admit("a", "1", 1) is None
    assert await shared._redis.pttl(f"{shared._cluster}:tenant-full:a") <= 1000
    await shared.release("a", "1")
    assert not await shared._redis.exists(f"{shared._cluster}:tenant-live:a")


def test_a_ledger_forgets_idle_tenants_and_refuses_to_grow_past_its_maximum() -> None:
    ledger = TenantLedger(LIMITS)
    for number in range(TENANTS_TRACKED_MAX):
        assert ledger.admit(1, f"t{number}", "key", 1) is None
    refusal = ledger.admit(1, "one more", "key", 1)
    assert refusal is not None and refusal.resource == TENANTS
    ledger.release(1, "t0", "key")
    assert ledger.admit(2_000_000, "one more", "key", 1) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20_000_000)), max_size=60))
def test_what_is_admitted_stays_below_the_rate(asked: list[tuple[int, int]]) -> None:
    """Over any stretch of time: one bucket, and what refills in it."""
    ledger = TenantLedger(TenantLimits(tokens_per_minute=60))
    now_us, granted = 1, []
    for tokens, pause_us in asked:
        now_us += pause_us
        refusal = ledger.admit(now_us, "a", str(len(granted)), tokens)
        if refusal is None:
            granted.append((now_us, tokens))
    for start in range(len(granted)):
        for end in range(start, len(granted)):
            took = sum(tokens for _, tokens in granted[start : end + 1])
            assert took <= 60 + (granted[end][0] - granted[start][0]) * 60 / WINDOW_US + 1


@given(st.integers(1, 60), st.integers(1, 60))
def test_retry_after_is_when_it_is_admitted(spent: int, asked: int) -> None:
    ledger = TenantLedger(TenantLimits(tokens_per_minute=60))
    assert ledger.admit(1, "a", "1", spent) is None
    refusal = ledger.admit(1, "a", "2", asked)
    assert (refusal is None) == (spent + asked <= 60)
    if refusal is not None:
        due_us = 1 + refusal.retry_after_ms * 1000
        assert ledger.admit(due_us - 2000, "a", "2", asked) is not None
        assert ledger.admit(due_us, "a", "2", asked) is None
