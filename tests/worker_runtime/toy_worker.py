"""A worker process on the toy engine: `python toy_worker.py`, config on stdin as for the real ones."""

from __future__ import annotations

import sys
from functools import partial

import decode_worker.app
import prefill_worker.app
from segue.config import WorkerConfig
from segue.ids import InstanceRef
from worker_runtime.engine_loading import LoadedEngine, page_memory
from worker_runtime.process import main
from worker_runtime.toy_engine import ToyEngine, toy_layout


def load_toy_engine(config: WorkerConfig, ref: InstanceRef) -> LoadedEngine:
    block_size = config.engine.block_size or 4
    pages, segment = page_memory(config, ref, config.engine.pages, toy_layout(block_size).page_bytes)
    return LoadedEngine(ToyEngine(config.engine.pages, block_size, buffer=pages), pages, segment)


if __name__ == "__main__":
    app = prefill_worker.app if sys.argv[1] == "prefill" else decode_worker.app
    sys.exit(main(partial(app.run, load=load_toy_engine)))
