"""Real children, made of small modules written by the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher import processes
from launcher.processes import ChildProcess, exit_reason, stop_children
from segue.config import FrontConfig

SERVES = """
import json, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
config = json.loads(sys.stdin.readline())
print("loading", flush=True)
print(json.dumps({"ready": {"port": config["grpc_port"]}}), flush=True)
signal.sigwait([signal.SIGTERM])
"""
FAILS = "import sys; sys.stdin.readline(); sys.exit('no such model')"
IGNORES_SIGTERM = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(json.dumps({"ready": {}}), flush=True)
time.sleep(600)
"""
SECONDS_MAX = 30

StartChild = Callable[[str], ChildProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartChild]:
    started: list[ChildProcess] = []

    def start_child(source: str) -> ChildProcess:
        (tmp_path / "sample_child.py").write_text(source)
        environment = {"PYTHONPATH": str(tmp_path)}
        config = FrontConfig(grpc_port=1234)
        started.append(ChildProcess("sample", "sample_child", config, logs=tmp_path, environment=environment))
        return started[-1]

    yield start_child
    stop_children(started)


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + SECONDS_MAX
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(met)


def test_child_gets_its_config_and_announces_itself(start: StartChild) -> None:
    child = start(SERVES)
    assert eventually(lambda: child.ready() is not None)
    assert child.ready() == {"port": 1234}
    assert child.death() is None


def test_dead_child_is_reported_with_the_end_of_its_log(start: StartChild) -> None:
    child = start(FAILS)
    assert eventually(child.death)
    death = child.death()
    assert death is not None
    assert (death.name, death.reason, death.log_tail) == ("sample", "exited with status 1", "no such model")


def test_stopped_child_ends_by_itself(start: StartChild) -> None:
    child = start(SERVES)
    assert eventually(lambda: child.ready() is not None)
    stop_children([child])
    death = child.death()
    assert death is not None
    assert death.reason == "exited with status 0"


def test_child_that_ignores_sigterm_is_killed(start: StartChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS_MAX", 0.2)
    child = start(IGNORES_SIGTERM)
    assert eventually(lambda: child.ready() is not None)
    stop_children([child])
    assert not psutil.pid_exists(child.pid)


def test_child_is_out_of_reach_of_the_terminals_signals(start: StartChild) -> None:
    child = start(SERVES)
    assert os.getsid(child.pid) != os.getsid(0)


LAUNCHER = """
import sys, time
from pathlib import Path
from launcher.processes import ChildProcess
from segue.config import FrontConfig
folder = Path(sys.argv[1])
child = ChildProcess("sample", "sample_child", FrontConfig(), logs=folder, environment={"PYTHONPATH": str(folder)})
while child.ready() is None:
    time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_child_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sample_child.py").write_text(SERVES)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert psutil.pid_exists(pid)
        launcher.kill()
    assert eventually(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL (often the kernel, out of memory)"),
    ],
)
def test_exit_reasons(code: int, reason: str) -> None:
    assert exit_reason(code) == reason
