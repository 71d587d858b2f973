"""A `segue up` in its own process, driven as a person would: options in, banner out, Ctrl-C to end it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launcher.host_facts import SHARED_MEMORY
from launcher.runtime_dir import NAME_PREFIX, OWNER_FILE, base_dir

SEGUE = Path(sys.executable).parent / "segue"
START_SECONDS_MAX = 240
STOP_SECONDS_MAX = 60
LAST_LINE = "Ctrl-C stops everything."


@dataclass
class ClusterProcess:
    """Started on construction; `wait_ready` fills the addresses."""

    options: list[str]
    grpc: str = ""
    http: str = ""
    output: str = ""
    _process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        # By way of launcher.child, so that a test run that is killed takes its clusters along.
        segue = [sys.executable, "-m", "launcher.child", str(os.getpid()), "launcher.cli"]
        command = [*segue, "up", "--grpc-port", "0", "--http-port", "0", *self.options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        self._read_until(lambda: LAST_LINE in self.output, START_SECONDS_MAX)
        assert LAST_LINE in self.output, f"not ready:\n{self.output}"
        self.grpc = re.search(r"gRPC  (\S+)", self.output)[1]  # type: ignore[index]
        self.http = re.search(r"HTTP  (\S+)/v1", self.output)[1]  # type: ignore[index]

    def wait_for_text(self, text: str, seconds_max: float = START_SECONDS_MAX) -> None:
        """Until the launcher has said `text` since it was ready."""
        start = self.output.index(LAST_LINE)
        self._read_until(lambda: text in self.output[start:], seconds_max)
        assert text in self.output[start:], f"it never said {text!r}:\n{self.output}"

    def _read_until(self, enough, seconds_max: float) -> None:  # type: ignore[no-untyped-def]
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds_max
        while not enough() and time.monotonic() < deadline:
            if select.select([self._process.stdout], [], [], 0.2)[0]:
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    return
                self.output += chunk.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_end(self) -> int:
        """Exit status; everything the launcher still said is in `output`."""
        self._read_until(lambda: False, STOP_SECONDS_MAX)
        return self._process.wait(timeout=STOP_SECONDS_MAX)

    def close(self) -> int:
        if self._process.poll() is None:
            self.press_ctrl_c()
        status = self.wait_end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def runtime_dir(self) -> Path:
        owners = base_dir().glob(f"{NAME_PREFIX}*/{OWNER_FILE}")
        return next(owner.parent for owner in owners if owner.read_text().startswith(f"{self.pid} "))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that still run; zombies wait only for their new parent to notice. Names them for the failure message."""
    running = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return running


def shared_memory(cluster: str) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(cluster + "*"))


def eventually_none_alive(processes: list[psutil.Process], seconds_max: float = 20.0) -> list[str]:
    deadline = time.monotonic() + seconds_max
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def running(*options: str) -> Iterator[ClusterProcess]:
    cluster = ClusterProcess([*options])
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        status = cluster.close()
    assert status == 0, cluster.output
