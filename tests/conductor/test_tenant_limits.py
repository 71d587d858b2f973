"""Tenant limits over two Conductors and a real Redis: exact together, on their own while it is away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from redis_server import RedisServer

from conductor.control_loop import monotonic_us
from conductor.tenant_limits import TenantLimiter, Ticket
from kvstore.directory_choice import open_directory
from segue.config import DirectoryConfig, TenantLimits
from segue.errors import Overloaded

THREE = TenantLimits(requests_max=3)
SLOW = TenantLimits(tokens_per_minute=60)

Make = Callable[..., Awaitable[TenantLimiter]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """`await make(server, limits)`: a running limiter of one more Conductor of this test's cluster."""
    cluster = f"test-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:

        async def start(server: RedisServer, limits: TenantLimits) -> TenantLimiter:
            directory = open_directory(DirectoryConfig(redis_url=server.url, cluster=cluster), monotonic_us)
            stack.push_async_callback(directory.close)
            shared = directory.shared_tenants(limits)
            limiter = TenantLimiter(limits, secrets.token_hex(4), monotonic_us, shared)
            running = asyncio.create_task(limiter.run())
            stack.push_async_callback(asyncio.gather, running, return_exceptions=True)
            stack.callback(running.cancel)
            return limiter

        yield start


async def admitted(limiter: TenantLimiter, tokens: int = 1) -> Ticket | None:
    try:
        return await limiter.admit("a", tokens)
    except Overloaded:
        return None


async def until_admitted(limiter: TenantLimiter, tokens: int = 1) -> Ticket:
    while (ticket := await admitted(limiter, tokens)) is None:
        await asyncio.sleep(0.02)
    return ticket


async def test_a_limit_holds_over_conductors_that_are_asked_at_once(redis_server: RedisServer, make: Make) -> None:
    one, two = await make(redis_server, THREE), await make(redis_server, THREE)
    tickets = await asyncio.gather(*(admitted(limiter) for _ in range(10) for limiter in (one, two)))
    assert sum(ticket is not None for ticket in tickets) == 3
    with pytest.raises(Overloaded, match="tenant 'a' has 3 live requests, at most 3 are allowed"):
        await two.admit("a", 1)
    assert one.decided_alone == two.decided_alone == 0


async def test_a_place_given_back_is_taken_at_the_other_conductor(redis_server: RedisServer, make: Make) -> None:
    one, two = await make(redis_server, THREE), await make(redis_server, THREE)
    tickets = [await one.admit("a", 1) for _ in range(3)]
    assert await admitted(two) is None
    assert tickets[0] is not None
    one.end(tickets[0])
    one.end(tickets[0])
    await until_admitted(two)
    assert await admitted(two) is None


async def test_generated_tokens_count_at_the_other_conductor_while_the_request_runs(
    redis_server: RedisServer, make: Make
) -> None:
    one, two = await make(redis_server, SLOW), await make(redis_server, SLOW)
    ticket = await one.admit("a", 10)
    assert ticket is not None
    ticket.uncharged += 500
    while await admitted(two, 0) is not None:
        await asyncio.sleep(0.05)


async def test_a_request_refused_by_the_shared_count_costs_nothing_at_home(
    redis_server: RedisServer, make: Make
) -> None:
    one, two = await make(redis_server, SLOW), await make(redis_server, SLOW)
    assert await one.admit("a", 50) is not None
    for _ in range(5):
        assert await admitted(two, 40) is None
    assert await two.admit("a", 9) is not None


async def test_without_the_directory_each_conductor_counts_alone_and_together_again_after(
    redis_alone: RedisServer, make: Make
) -> None:
    """Nothing fails for its absence; what is live when it returns, empty, has its places there again."""
    one, two = await make(redis_alone, THREE), await make(redis_alone, THREE)
    assert await one.admit("a", 1) is not None
    redis_alone.stop()
    tickets = [await two.admit("a", 1) for _ in range(3)]
    assert two.decided_alone == 3
    assert await admitted(two) is None, "its own limit still holds"
    redis_alone.start()
    while (probe := await admitted(one)) is not None:
        one.end(probe)
        await asyncio.sleep(0.05)
    for ticket in tickets:
        assert ticket is not None
        two.end(ticket)
    await until_admitted(one)


async def test_a_directory_that_hangs_delays_one_request_and_no_other(redis_alone: RedisServer, make: Make) -> None:
    one = await make(redis_alone, TenantLimits(requests_max=100))
    assert await one.admit("a", 1) is not None
    redis_alone.freeze()
    for _ in range(20):
        assert await one.admit("a", 1) is not None
    assert one.decided_alone == 20
    redis_alone.thaw()
