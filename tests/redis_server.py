"""A real redis-server for tests: on a free port, without a disk, stopped and started again at the same address."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parent.parent / "build" / "redis"
START_SECONDS_MAX = 20.0


def _binary() -> tuple[str, dict[str, str]]:
    """The program and its environment: from PATH, else what `fetch_redis.sh` unpacked. Skips the test without one."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found, {}
    unpacked = UNPACKED / "usr" / "bin" / "redis-server"
    if not unpacked.exists():
        pytest.skip("no redis-server: none on PATH, and tests/fetch_redis.sh (make install-dev) could not fetch one")
    return str(unpacked), {"LD_LIBRARY_PATH": ":".join(str(path) for path in UNPACKED.glob("usr/lib/*-linux-gnu"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Runs from construction; `close` ends it. What it held is lost with each `stop`, as in a cache without a disk."""

    def __init__(self, folder: Path) -> None:
        self._program, self._environment = _binary()
        self._folder = folder
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self._folder}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        log = (self._folder / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [self._program, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False

    def stop(self) -> None:
        """Killed: connections break, nothing is saved."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """It accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process is not None:
            self.stop()
