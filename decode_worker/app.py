"""A decode or aggregated instance: composition root and process entry (`python -m decode_worker.app`)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from decode_worker.core.core import DecodeCore
from segue.batch_planner import BatchPlanner
from segue.block_pool import BlockPool
from segue.config import WorkerConfig
from segue.errors import ConfigError
from segue.handoff import HandoffTiming
from segue.ids import InstanceRef
from segue.manifest import Role
from worker_runtime.engine_loading import LoadEngine, load_torch_engine
from worker_runtime.instance import OnReady, serve
from worker_runtime.process import main


def make_core(
    ref: InstanceRef, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming, _: WorkerConfig
) -> DecodeCore:
    return DecodeCore(ref, planner, pool, timing)


def run(
    config: WorkerConfig,
    stop: threading.Event,
    on_ready: OnReady,
    *,
    load: LoadEngine = load_torch_engine,
    record: Path | None = None,
    drain: threading.Event | None = None,
) -> None:
    """Serve until `stop`, or until everything that runs has ended after `drain`; `on_ready` is called when a Conductor
    has registered the instance."""
    if config.role not in (Role.DECODE, Role.AGGREGATED):
        raise ConfigError(f"role: decode_worker serves decode and aggregated, not {config.role.value}")
    serve(config, stop, on_ready, make_core, load, record, drain)


if __name__ == "__main__":
    sys.exit(main(run))
