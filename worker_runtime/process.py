"""A worker as a process: one line of JSON in, one line of JSON out when ready, signals to end.

SIGTERM, as Kubernetes and a launcher that scales down send it: take nothing new, end what runs, then leave; what has
not ended after `drain_s` is planned again elsewhere. SIGINT, or a second SIGTERM: leave at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Protocol

from segue.config import WorkerConfig, decode_config
from segue.errors import ConfigError
from worker_runtime.instance import OnReady

RECORD_DIR_VARIABLE = "SEGUE_RECORD_DIR"
"""Names a directory for recordings of the I/O loop; unset: none are made."""

EXIT_CONFIG = 2
EXIT_STUCK = 4

END_S_MAX = 20.0
"""An orderly end takes a second or two. A thread of a library that does not let go must not keep a process, and its
share of memory, alive after its launcher is gone."""


class Run(Protocol):
    def __call__(
        self,
        config: WorkerConfig,
        stop: threading.Event,
        on_ready: OnReady,
        *,
        record: Path | None = None,
        drain: threading.Event | None = None,
    ) -> None: ...


def main(run: Run) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a bad configuration, 1 (and a traceback) for anything else."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    orders = EndOrders()
    signal.signal(signal.SIGTERM, lambda *_: orders.drain_or_stop())
    signal.signal(signal.SIGINT, lambda *_: orders.stop_now())
    try:
        config = decode_config(sys.stdin.buffer.readline(), WorkerConfig, "stdin")
        orders.drain_s = config.scheduler.drain_s
        run(config, orders.stop, _say_ready, record=_record_path(config), drain=orders.drain)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


class EndOrders:
    """What signals have asked for; the methods run in signal handlers. Each order arms the timer that ends a process
    which does not follow it."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.drain = threading.Event()
        self.drain_s = 0.0

    def drain_or_stop(self) -> None:
        if self.drain.is_set():
            self.stop_now()
        else:
            self.drain.set()
            _end_after(self.drain_s + END_S_MAX)

    def stop_now(self) -> None:
        if not self.stop.is_set():
            self.stop.set()
            _end_after(END_S_MAX)


def _end_after(seconds: float) -> None:
    last = threading.Timer(seconds, os._exit, (EXIT_STUCK,))
    last.daemon = True
    last.start()


def _say_ready(facts: dict[str, str]) -> None:
    print(json.dumps({"ready": facts}), flush=True)


def _record_path(config: WorkerConfig) -> Path | None:
    directory = os.environ.get(RECORD_DIR_VARIABLE)
    return Path(directory) / f"{config.name}-{os.getpid()}.steps" if directory else None
