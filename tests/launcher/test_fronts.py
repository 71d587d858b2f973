"""Conductor + gateway processes, as the launcher keeps them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_server import RedisServer

from launcher.directory_check import check_directory
from launcher.fronts import Fronts
from launcher.supervision import RestartLimits
from segue.config import DirectoryConfig, FrontConfig
from segue.errors import ConfigError

SECONDS_MAX = 60.0


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def test_one_of_several_comes_back_at_its_address_and_one_alone_does_not(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    said: list[str] = []
    directory = DirectoryConfig(redis_url=redis_server.url, cluster="test-fronts")
    config = FrontConfig(grpc_port=0, http_port=0, directory=directory)
    quick = RestartLimits(stable_us=60_000_000, backoff_first_us=10_000)
    pair, single = Fronts([config] * 2, tmp_path, said.append, quick), Fronts([config], tmp_path, said.append, quick)
    try:
        for fronts in (pair, single):
            fronts.start()
        first, _ = wait_for(pair.addresses)
        wait_for(single.addresses)
        for pid in (pair.pids()["front-0"], single.pids()["front"]):
            os.kill(pid, signal.SIGKILL)
        assert wait_for(single.tend).name == "front"
        wait_for(lambda: pair.tend() or any("front-0 is up again" in text for text in said))
        assert pair.tend() is None
        assert not any("serves again" in text for text in said), "it has no instance yet"
        assert httpx.get(f"http://{first.http}/health", trust_env=False, timeout=20).status_code == 200
        assert said[0].startswith("front-0 was killed by SIGKILL")
    finally:
        pair.stop()
        single.stop()


def test_a_directory_that_does_not_answer_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"--redis-url: redis: .*127\.0\.0\.1:1"):
        check_directory(DirectoryConfig(redis_url="redis://:secret@127.0.0.1:1"))
    with pytest.raises(ConfigError) as error:
        check_directory(DirectoryConfig(redis_url="redis://:secret@127.0.0.1:1"))
    assert "secret" not in str(error.value)


def test_the_embedded_directory_is_always_there() -> None:
    check_directory(DirectoryConfig())
