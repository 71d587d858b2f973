"""Whether the directory that was asked for answers: said before anything starts, because later it may be away."""

from __future__ import annotations

import asyncio
import time

from kvstore.directory import DirectoryUnavailable
from kvstore.directory_choice import open_directory
from segue.config import DirectoryConfig
from segue.errors import ConfigError


def check_directory(config: DirectoryConfig) -> None:
    """Raises ConfigError that names the option."""
    asyncio.run(_ask(config))


async def _ask(config: DirectoryConfig) -> None:
    directory = open_directory(config, lambda: time.monotonic_ns() // 1000)
    try:
        await directory.members()
    except DirectoryUnavailable as error:
        raise ConfigError(f"--redis-url: {error}; start one with: redis-server --port 6379") from error
    finally:
        await directory.close()
