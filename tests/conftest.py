"""Set before anything is imported or drawn.

Triton reads TRITON_INTERPRET when it is first imported, and in a run of all tests that is long before the first
kernel test: where no GPU can be, kernels are to be interpreted, and that is said here.

Hypothesis has no deadline: how long an example takes says nothing on a machine that does other things as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from redis_server import RedisServer

settings.register_profile("segue", deadline=None)
settings.load_profile("segue")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for tests that leave it alone; they keep apart by the names of their clusters."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def redis_alone(tmp_path: Path) -> Iterator[RedisServer]:
    """A test's own, to be stopped and frozen."""
    server = RedisServer(tmp_path)
    yield server
    server.close()
