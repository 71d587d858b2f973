"""The actor class of one instance: runs a worker's `run`; lets it be drained and stopped. Knows nothing of Ray."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from segue.config import WorkerConfig

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class InstanceActor:
    """Needs three threads of concurrency: `run` and `wait_ready` block, `drain` and `stop` must still get through.

    stdout and stderr go to `log`, where the launcher looks when the instance dies.
    """

    def __init__(self, module: str, config: bytes, log: str) -> None:
        _redirect_output(log)
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
        self._module = module
        self._config = msgspec.json.decode(config, type=WorkerConfig)
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._ready = threading.Event()
        _call_on_sigterm(self.drain)

    def run(self) -> None:
        """Serve until `stop`, or until everything has ended after `drain`; an exception of the worker is the caller's
        to see."""
        importlib.import_module(self._module).run(self._config, self._stop, self._on_ready, drain=self._drain)

    def _on_ready(self, *_: Any) -> None:
        self._ready.set()

    def wait_ready(self) -> int:
        """The process id, once the instance serves."""
        self._ready.wait()
        return os.getpid()

    def drain(self) -> None:
        self._drain.set()

    def stop(self) -> None:
        self._stop.set()


def _call_on_sigterm(call: Callable[[], None]) -> None:
    """To be called by the main thread, where Ray makes actors. It never returns to Python, where signal handlers run;
    but the interpreter's C handler writes the number of a signal to a descriptor, and a thread can read it there."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        while True:
            if signal.SIGTERM in os.read(reader, 64):
                call()

    threading.Thread(target=read, name="signals", daemon=True).start()


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
