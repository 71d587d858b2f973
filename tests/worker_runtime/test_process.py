"""The end of a worker process: asked for once, it comes, whatever a library does."""

from __future__ import annotations

import signal
import subprocess
import sys

import msgspec

from segue.config import ModelConfig, WorkerConfig
from segue.manifest import Role
from worker_runtime.process import EXIT_STUCK

STUCK = """
import sys, threading
from worker_runtime import process
process.END_S_MAX = 0.2
def run(config, stop, on_ready, *, record=None, drain=None):
    on_ready({"name": config.name})
    stop.wait()
    threading.Thread(target=threading.Event().wait).start()
sys.exit(process.main(run))
"""


def test_process_whose_thread_does_not_let_go_still_ends() -> None:
    config = WorkerConfig(uuid="u", name="decode-0", role=Role.DECODE, model=ModelConfig(path="toy"))
    with subprocess.Popen([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(config) + b"\n")
        child.stdin.flush()
        assert b"ready" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == EXIT_STUCK


OBEYS = """
import sys
from worker_runtime import process
def run(config, stop, on_ready, *, record=None, drain=None):
    on_ready({"name": config.name})
    drain.wait()
    on_ready({"drains": str(not stop.is_set())})
    stop.wait()
sys.exit(process.main(run))
"""


def test_first_sigterm_asks_to_drain_and_the_second_to_end() -> None:
    config = WorkerConfig(uuid="u", name="decode-0", role=Role.DECODE, model=ModelConfig(path="toy"))
    with subprocess.Popen([sys.executable, "-c", OBEYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(config) + b"\n")
        child.stdin.flush()
        assert b"ready" in child.stdout.readline()
        child.terminate()
        assert b"True" in child.stdout.readline()
        child.terminate()
        assert child.wait(timeout=60) == 0
