"""A worker process on the paced toy engine: `python live_paced_worker.py ROLE COST_MODEL.json`, config on stdin as for
the real ones. Its last line on standard output says for how long its engine was busy, and by how much steps were late.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import msgspec
from live_paced_engine import PacedEngine

import decode_worker.app
import prefill_worker.app
from segue.config import WorkerConfig
from segue.cost_model import CostModel
from segue.ids import InstanceRef
from worker_runtime.engine_loading import LoadedEngine, page_memory
from worker_runtime.process import main
from worker_runtime.toy_engine import ToyEngine, toy_layout


def load(cost: CostModel, made: list[PacedEngine], config: WorkerConfig, ref: InstanceRef) -> LoadedEngine:
    engine = config.engine
    pages, segment = page_memory(config, ref, engine.pages, toy_layout(engine.block_size).page_bytes)
    toy = ToyEngine(engine.pages, engine.block_size, max_model_len=config.model.max_model_len, buffer=pages)
    made.append(PacedEngine(toy, cost))
    return LoadedEngine(made[0], pages, segment)


if __name__ == "__main__":
    app = prefill_worker.app if sys.argv[1] == "prefill" else decode_worker.app
    model = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=CostModel)
    engines: list[PacedEngine] = []
    status = main(partial(app.run, load=partial(load, model, engines)))
    print(json.dumps({"busy_s": engines[0].busy_s, "late_s": engines[0].late_s}), flush=True)
    sys.exit(status)
