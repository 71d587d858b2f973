"""A worker as a process: one line of JSON in, one line of JSON out when ready, SIGTERM to end."""

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
        self, config: WorkerConfig, stop: threading.Event, on_ready: OnReady, *, record: Path | None = None
    ) -> None: ...


def main(run: Run) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a bad configuration, 1 (and a traceback) for anything else."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _begin_end(stop))
    try:
        config = decode_config(sys.stdin.buffer.readline(), WorkerConfig, "stdin")
        run(config, stop, _say_ready, record=_record_path(config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _begin_end(stop: threading.Event) -> None:
    """In a signal handler; a second signal changes nothing."""
    if not stop.is_set():
        stop.set()
        last = threading.Timer(END_S_MAX, os._exit, (EXIT_STUCK,))
        last.daemon = True
        last.start()


def _say_ready(facts: dict[str, str]) -> None:
    print(json.dumps({"ready": facts}), flush=True)


def _record_path(config: WorkerConfig) -> Path | None:
    directory = os.environ.get(RECORD_DIR_VARIABLE)
    return Path(directory) / f"{config.name}-{os.getpid()}.steps" if directory else None
