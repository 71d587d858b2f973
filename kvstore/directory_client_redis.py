"""The connection to Redis, and what counts as its being away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.directory import DirectoryUnavailable
from segue.errors import ConfigError

CALL_S_MAX = 1.0
"""A server that has not answered for so long is away. Nobody waits for it: everything goes on from memory."""


def connect(url: str) -> Redis:
    """A client that answers bytes; connects when it is first used. Raises ConfigError for a URL that is none.

    One repetition, at once: after a restart of the server the pooled connection is the one that is broken."""
    try:
        client: Redis = Redis.from_url(
            url, socket_timeout=CALL_S_MAX, socket_connect_timeout=CALL_S_MAX, retry=Retry(NoBackoff(), 1)
        )
    except ValueError as error:
        raise ConfigError(f"--redis-url: {error}") from error
    return client


@asynccontextmanager
async def reachable() -> AsyncIterator[None]:
    """Also a server that answers, but not to this call (loading, read-only, out of memory, wrong password), is away."""
    try:
        yield
    except exceptions.RedisError as error:
        raise DirectoryUnavailable(f"redis: {error}") from error
