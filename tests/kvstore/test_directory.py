"""One contract for every directory: time passes in each as the test says."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import fakeredis
import pytest
from redis.asyncio import Redis
from redis_server import RedisServer

from kvstore.directory import NAMES_MAX, Directory, DirectoryFull, DirectoryUnavailable, MemoryDirectory
from kvstore.directory_client_redis import connect
from kvstore.directory_redis import RedisDirectory
from segue.errors import ConfigError

Pass = Callable[[int], Awaitable[None]]


class Rig:
    """A directory, and how to let milliseconds pass in it."""

    def __init__(self, directory: Directory, pass_ms: Pass) -> None:
        self.directory = directory
        self.pass_ms = pass_ms


@pytest.fixture(params=["memory", "fake redis", "real redis"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "memory":
        now_us = [0]

        async def pass_memory(ms: int) -> None:
            now_us[0] += ms * 1000

        yield Rig(MemoryDirectory(lambda: now_us[0]), pass_memory)
        return
    redis: Redis = fakeredis.FakeAsyncRedis()
    if request.param == "real redis":
        redis = connect(request.getfixturevalue("redis_server").url)

    async def pass_redis(ms: int) -> None:
        for key in await redis.keys():
            left = await redis.pttl(key)
            if left >= 0:
                await (redis.pexpire(key, left - ms) if left > ms else redis.delete(key))

    directory = RedisDirectory(redis, f"test-{secrets.token_hex(4)}")
    yield Rig(directory, pass_redis)
    await directory.close()


async def test_members_are_found_by_prefix_with_their_newest_value(rig: Rig) -> None:
    await rig.directory.announce("conductor/a", b"1", 1000)
    await rig.directory.announce("conductor/a", b"2", 1000)
    await rig.directory.announce("worker/b", b"3", 1000)
    assert await rig.directory.members("conductor/") == {"conductor/a": b"2"}
    assert set(await rig.directory.members()) == {"conductor/a", "worker/b"}


async def test_a_prefix_is_no_pattern(rig: Rig) -> None:
    await rig.directory.announce("abc", b"1", 1000)
    assert await rig.directory.members("*") == {}
    assert await rig.directory.members("[a]") == {}


async def test_a_member_that_does_not_renew_disappears(rig: Rig) -> None:
    await rig.directory.announce("a", b"1", 1000)
    await rig.directory.announce("b", b"1", 1000)
    await rig.pass_ms(600)
    await rig.directory.announce("b", b"1", 1000)
    await rig.pass_ms(600)
    assert await rig.directory.members() == {"b": b"1"}


async def test_a_withdrawn_member_is_gone(rig: Rig) -> None:
    await rig.directory.announce("a", b"1", 1000)
    await rig.directory.withdraw("a")
    await rig.directory.withdraw("a")
    assert await rig.directory.members() == {}


async def test_a_lease_has_one_holder(rig: Rig) -> None:
    first = await rig.directory.acquire("scaler", "x", 1000)
    assert first is not None
    assert await rig.directory.acquire("scaler", "y", 1000) is None
    assert await rig.directory.acquire("scaler", "x", 1000) == first
    assert await rig.directory.acquire("other", "y", 1000) is not None


async def test_a_lease_that_ran_out_is_lost_and_the_next_holders_token_is_larger(rig: Rig) -> None:
    first = await rig.directory.acquire("scaler", "x", 1000)
    assert first is not None
    await rig.pass_ms(1001)
    assert not await rig.directory.renew(first, 1000), "even before somebody else took it"
    second = await rig.directory.acquire("scaler", "y", 1000)
    assert second is not None and second.token > first.token
    await rig.directory.release(first)
    assert await rig.directory.renew(second, 1000), "a former holder cannot end it"


async def test_a_renewed_lease_lasts(rig: Rig) -> None:
    """Long ones: the real Redis counts what the test itself takes as well."""
    lease = await rig.directory.acquire("scaler", "x", 100_000)
    assert lease is not None
    for _ in range(3):
        await rig.pass_ms(60_000)
        assert await rig.directory.renew(lease, 100_000)
    assert await rig.directory.acquire("scaler", "y", 100_000) is None


async def test_a_released_lease_is_free_and_its_token_is_not_used_again(rig: Rig) -> None:
    first = await rig.directory.acquire("scaler", "x", 1000)
    assert first is not None
    await rig.directory.release(first)
    again = await rig.directory.acquire("scaler", "x", 1000)
    assert again is not None and again.token > first.token


async def test_what_is_agreed_is_what_was_proposed_first(rig: Rig) -> None:
    assert await rig.directory.agree("secret", b"first") == b"first"
    assert await rig.directory.agree("secret", b"second") == b"first"
    await rig.pass_ms(1_000_000)
    assert await rig.directory.agree("secret", b"third") == b"first"


@pytest.mark.parametrize("lease_ms", [0, -1])
async def test_a_lease_without_duration_is_our_bug(rig: Rig, lease_ms: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        await rig.directory.announce("a", b"", lease_ms)


async def test_an_embedded_directory_refuses_to_grow_past_its_maximum() -> None:
    now_us = [0]
    directory = MemoryDirectory(lambda: now_us[0])
    for number in range(NAMES_MAX):
        await directory.announce(f"m{number}", b"", 1000)
    with pytest.raises(DirectoryFull):
        await directory.announce("one more", b"", 1000)
    now_us[0] = 1_000_001
    await directory.announce("one more", b"", 1000)
    assert await directory.members() == {"one more": b""}


async def test_redis_away_is_a_typed_error() -> None:
    server = fakeredis.FakeServer()
    server.connected = False
    redis = fakeredis.FakeAsyncRedis(server=server)
    with pytest.raises(DirectoryUnavailable):
        await RedisDirectory(redis, "test").members()
    await redis.aclose()


async def test_a_server_that_answers_nothing_is_away_within_its_time(redis_alone: RedisServer) -> None:
    directory = RedisDirectory(connect(redis_alone.url), "test")
    await directory.announce("a", b"1", 60_000)
    redis_alone.freeze()
    with pytest.raises(DirectoryUnavailable):
        await directory.members()
    redis_alone.thaw()
    assert await directory.members() == {"a": b"1"}
    await directory.close()


async def test_a_server_that_was_started_again_is_found_by_the_first_call(redis_alone: RedisServer) -> None:
    """The pooled connection is broken, which the caller need not know."""
    directory = RedisDirectory(connect(redis_alone.url), "test")
    await directory.announce("a", b"1", 60_000)
    redis_alone.stop()
    with pytest.raises(DirectoryUnavailable):
        await directory.announce("a", b"1", 60_000)
    redis_alone.start()
    assert await directory.members() == {}
    redis_alone.stop()
    redis_alone.start()
    await directory.announce("a", b"1", 60_000)
    assert await directory.members() == {"a": b"1"}
    await directory.close()


async def test_a_server_that_refuses_is_away(redis_alone: RedisServer) -> None:
    """Not only one that is gone: here it has no memory left to write to."""
    redis = connect(redis_alone.url)
    directory = RedisDirectory(redis, "test")
    await redis.config_set("maxmemory", "1")
    with pytest.raises(DirectoryUnavailable, match="maxmemory"):
        await directory.announce("a", b"1", 1000)
    await directory.close()


def test_a_url_of_something_else_names_the_option() -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        connect("http://127.0.0.1:1")
