"""A prefill instance: composition root and process entry (`python -m prefill_worker.app`)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from prefill_worker.core.core import PrefillCore
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
    ref: InstanceRef, planner: BatchPlanner, pool: BlockPool, timing: HandoffTiming, config: WorkerConfig
) -> PrefillCore:
    return PrefillCore(ref, planner, pool, timing, config.scheduler.max_num_batched_tokens)


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
    if config.role is not Role.PREFILL:
        raise ConfigError(f"role: prefill_worker serves prefill, not {config.role.value}")
    serve(config, stop, on_ready, make_core, load, record, drain)


if __name__ == "__main__":
    sys.exit(main(run))
