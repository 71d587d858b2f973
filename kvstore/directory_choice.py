"""Which directory a process uses: Redis where a URL names one, else the embedded one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvstore.directory import Directory, MemoryDirectory
from kvstore.directory_tenants import SharedTenants
from segue.config import DirectoryConfig, TenantLimits


class OpenDirectory(msgspec.Struct, frozen=True):
    """`tenants` is None for the embedded directory: one Conductor counts by itself."""

    directory: Directory
    tenants: SharedTenants | None


def open_directory(config: DirectoryConfig, limits: TenantLimits, clock_us: Callable[[], int]) -> OpenDirectory:
    """Does not wait for a server. Raises ConfigError for a URL that is none."""
    if not config.redis_url:
        return OpenDirectory(MemoryDirectory(clock_us), None)
    from kvstore.directory_redis import RedisDirectory, connect  # 0.1 s that a single Conductor need not spend
    from kvstore.directory_tenants_redis import RedisTenants

    client = connect(config.redis_url)
    return OpenDirectory(RedisDirectory(client, config.cluster), RedisTenants(client, config.cluster, limits))
