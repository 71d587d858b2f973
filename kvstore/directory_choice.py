"""Which directory a process uses: Redis where a URL names one, else the embedded one."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.directory import Directory, MemoryDirectory
from segue.config import DirectoryConfig


def open_directory(config: DirectoryConfig, clock_us: Callable[[], int]) -> Directory:
    """Does not wait for a server. Raises ConfigError for a URL that is none."""
    if not config.redis_url:
        return MemoryDirectory(clock_us)
    from kvstore.directory_client_redis import connect  # 0.1 s that a single Conductor need not spend
    from kvstore.directory_redis import RedisDirectory

    return RedisDirectory(connect(config.redis_url), config.cluster)
