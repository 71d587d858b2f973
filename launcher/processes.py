"""Children of the launcher: one process each for the Conductor + gateway and, without Ray, for every instance.

A child reads its config as JSON from stdin and says `{"ready": ...}` on stdout once it serves. Its stdout and stderr
are files, so that nobody has to drain a pipe and a dying launcher breaks none. Children get their own session: a Ctrl-C
in the terminal reaches the launcher alone, which then stops them in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.cluster_plan import ENTRY_MODULES
from launcher.instance_pool import Death
from launcher.runtime_dir import clear_slot
from segue.config import Config, WorkerConfig
from segue.manifest import Role

STOP_SECONDS_MAX = 10.0
"""A child that has not ended this long after it was told to is killed."""

POLL_SECONDS = 0.05

LOG_TAIL_LINES = 25


class ChildProcess:
    """One child. `log` receives its stderr."""

    def __init__(
        self, name: str, module: str, config: Config, *, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._stdout = logs / f"{name}.out"
        with self._stdout.open("wb") as stdout, self.log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "launcher.child", str(os.getpid()), module],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._send(msgspec.json.encode(config) + b"\n")

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(line)
        except BrokenPipeError:
            pass  # it died at once: `death` tells, with its log

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Any | None:
        """What the child announced, or None while it starts."""
        for line in self._stdout.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"ready"') and line.endswith(b"\n"):
                return msgspec.json.decode(line)["ready"]
        return None

    def death(self) -> Death | None:
        code = self._process.poll()
        return None if code is None else Death(self.name, exit_reason(code), log_tail(self.log))

    def kill(self) -> None:
        self._process.kill()

    def send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait_or_kill(self, deadline: float) -> None:
        """Wait until `deadline` (time.monotonic), then kill. The child is reaped either way."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def stop_children(children: Sequence[ChildProcess], number: signal.Signals = signal.SIGTERM) -> None:
    """End all of them together: the slowest decides how long it takes."""
    deadline = time.monotonic() + STOP_SECONDS_MAX
    for child in children:
        child.send(number)
    for child in children:
        child.wait_or_kill(deadline)


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    hint = " (often the kernel, out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def log_tail(log: Path) -> str:
    """The end of a log that may not exist yet."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def thread_environment(threads: int) -> dict[str, str]:
    """Math libraries read these once, when they are loaded."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


class LocalProcesses:
    """An InstancePool without Ray: GPU hosts that have none, and debugging.

    `modules` are the entry points by role, `environment` is added to every child's."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *,
        logs: Path,
        modules: Mapping[Role, str] = ENTRY_MODULES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._logs = logs
        self._modules = modules
        self._environment = environment or {}
        self._children: dict[str, ChildProcess] = {}

    def start(self) -> None:
        for name in self._workers:
            self._start_child(name)

    def _start_child(self, name: str) -> None:
        worker = self._workers[name]
        environment = {**thread_environment(worker.engine.threads), **self._environment}
        module = self._modules[worker.role]
        self._children[name] = ChildProcess(name, module, worker, logs=self._logs, environment=environment)

    def ready(self) -> set[str]:
        return {child.name for child in list(self._children.values()) if child.ready() is not None}

    def deaths(self) -> list[Death]:
        return [death for child in list(self._children.values()) if (death := child.death())]

    def failure(self) -> Death | None:
        return None  # there is nothing but the instances

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def kill(self, name: str) -> None:
        self._children[name].kill()

    def restart(self, name: str) -> None:
        clear_slot(self._workers[name])
        self._start_child(name)

    def add(self, worker: WorkerConfig) -> None:
        self._workers[worker.name] = worker
        self._start_child(worker.name)

    def retire(self, name: str) -> None:
        self._children[name].send(signal.SIGTERM)

    def remove(self, name: str) -> None:
        del self._children[name]
        clear_slot(self._workers.pop(name))

    def stop(self) -> None:
        """SIGINT: at once, where SIGTERM would let requests end."""
        stop_children(list(self._children.values()), signal.SIGINT)
