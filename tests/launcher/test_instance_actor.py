"""The actor's class without Ray, in a process of its own because it takes over stdout and stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = """
def run(config, stop, on_ready, *, drain):
    print("runs", config.name, flush=True)
    if config.model.path == "bad":
        raise ValueError("no such model")
    on_ready()
    if config.model.path == "told to go":
        drain.wait()
        print("drains", flush=True)
    else:
        stop.wait()
    print("ends", flush=True)
"""
SCRIPT = """
import os, signal, sys, threading
import msgspec
from launcher.instance_actor import InstanceActor
from segue.config import ModelConfig, WorkerConfig
from segue.manifest import Role
config = WorkerConfig(uuid="u", name="decode-0", role=Role.DECODE, model=ModelConfig(path=sys.argv[2]))
actor = InstanceActor("sample_worker", msgspec.json.encode(config), sys.argv[1])
running = threading.Thread(target=actor.run)
running.start()
if sys.argv[2] == "told to go":
    os.kill(actor.wait_ready(), signal.SIGTERM)
elif sys.argv[2] != "bad":
    actor.wait_ready()
    actor.stop()
running.join()
"""


def run_actor(folder: Path, model: str) -> str:
    """What stands in the actor's log after it ran and was stopped."""
    (folder / "sample_worker.py").write_text(WORKER)
    log = folder / "actor.log"
    command = [sys.executable, "-c", SCRIPT, str(log), model]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, timeout=60, check=True)
    assert done.stdout + done.stderr == b""
    return log.read_text()


def test_actor_runs_its_worker_until_it_is_stopped(tmp_path: Path) -> None:
    assert run_actor(tmp_path, "good") == "runs decode-0\nends\n"


def test_sigterm_lets_the_worker_drain(tmp_path: Path) -> None:
    assert run_actor(tmp_path, "told to go") == "runs decode-0\ndrains\nends\n"


def test_failure_of_the_worker_stands_in_its_log(tmp_path: Path) -> None:
    assert "ValueError: no such model" in run_actor(tmp_path, "bad")
