"""Instances as Ray actors on a lean local Ray that lives and dies with the launcher.

Ray places the actors, keeps their processes and notices deaths; requests, tokens and K/V never pass through it. Its
session lies inside the cluster's private folder, its daemons end with the launcher (Ray ties their fate to the driver),
and access needs a token made for this run alone (`ray_environment.py`, prepared before this module is imported).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray

from launcher.cluster_plan import ENTRY_MODULES
from launcher.instance_actor import InstanceActor
from launcher.instance_pool import Death
from launcher.processes import STOP_SECONDS_MAX, log_tail
from launcher.runtime_dir import clear_slot
from segue.config import WorkerConfig
from segue.limits import INSTANCES_MAX

NODE_ADDRESS = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's outward address; another loopback address is kept."""

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: no object of ours goes through it."""

INSTANCE_RESOURCE = "segue_instance"

VITAL_DAEMONS = ("raylet", "gcs_server")

SYSTEM_CONFIG = {
    # A dead node is noticed after about 2 s instead of 15 s.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 600,
    "health_check_failure_threshold": 2,
    # Idle Python workers cost 80 MB each and a second of start-up.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
}


class RayPool:
    """An InstancePool of one actor per instance."""

    def __init__(self, workers: Sequence[WorkerConfig], *, runtime_dir: Path, logs: Path) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._session_dir = runtime_dir / "ray"
        self._logs = logs
        self._actors: dict[str, Any] = {}
        self._runs: dict[str, Any] = {}
        """Result of each actor's `run`: resolved only when the instance has ended."""
        self._announcements: dict[str, Any] = {}

    def start(self) -> None:
        ray.init(
            address="local",
            _temp_dir=str(self._session_dir),
            _node_ip_address=NODE_ADDRESS,
            _system_config=SYSTEM_CONFIG,
            num_cpus=len(self._workers),
            num_gpus=0,
            resources={INSTANCE_RESOURCE: INSTANCES_MAX},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        # Ray prints pages of its own about every actor that dies; the launcher says it in a line. No option turns that
        # off: this is what Ray's debugger does to have the terminal for itself.
        ray._private.worker._worker_logs_enabled = False
        for name, worker in self._workers.items():
            self._start_actor(name, worker)

    def _start_actor(self, name: str, worker: WorkerConfig) -> None:
        options = {"num_cpus": 0, "resources": {INSTANCE_RESOURCE: 1}, "max_restarts": 0, "max_concurrency": 3}
        remote: Any = ray.remote  # its stubs have no overload for options held in a dict
        actor = remote(**options)(InstanceActor).remote(
            ENTRY_MODULES[worker.role], msgspec.json.encode(worker), str(self._logs / f"{name}.log")
        )
        self._actors[name] = actor
        self._announcements[name] = actor.wait_ready.remote()
        self._runs[name] = actor.run.remote()

    def ready(self) -> set[str]:
        return {
            name
            for name, announced in self._announcements.items()
            if _resolved(announced) and not _resolved(self._runs[name])
        }

    def deaths(self) -> list[Death]:
        return [
            Death(name, _ending(run), log_tail(self._logs / f"{name}.log"))
            for name, run in self._runs.items()
            if _resolved(run)
        ]

    def failure(self) -> Death | None:
        """Of a daemon of Ray's: actors live on as orphans then, and new ones wait for ever."""
        for daemon, process in _node().dead_processes():
            if daemon in VITAL_DAEMONS:
                log = self._session_dir / "session_latest" / "logs" / f"{daemon}.out"
                return Death(f"Ray's {daemon}", f"ended with status {process.returncode}", log_tail(log))
        return None

    def kill(self, name: str) -> None:
        """By the operating system: Ray asks the process itself to end, and one that hangs does not listen."""
        pid = self.pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self, name: str) -> None:
        """A new actor: Ray's own restarts know neither a back-off nor a process that hangs."""
        ray.kill(self._actors[name])
        clear_slot(self._workers[name])
        self._start_actor(name, self._workers[name])

    def add(self, worker: WorkerConfig) -> None:
        self._workers[worker.name] = worker
        self._start_actor(worker.name, worker)

    def retire(self, name: str) -> None:
        self._actors[name].drain.remote()

    def remove(self, name: str) -> None:
        ray.kill(self._actors.pop(name))
        del self._runs[name], self._announcements[name]
        clear_slot(self._workers.pop(name))

    def pid(self, name: str) -> int | None:
        announced = self._announcements[name]
        try:
            return int(ray.get(announced)) if _resolved(announced) else None
        except ray.exceptions.RayError:
            return None

    def stop(self) -> None:
        if not ray.is_initialized():
            return
        if self.failure() is not None:
            for name in self._actors:
                self.kill(name)
            orphans = _descendants_of_daemons()
            ray.shutdown()
            for orphan in orphans:
                with contextlib.suppress(psutil.NoSuchProcess):
                    orphan.kill()
            return
        for actor in self._actors.values():
            actor.stop.remote()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        pending = list(self._runs.values())
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=max(0.0, deadline - time.monotonic()))
        ray.shutdown()


def _node() -> Any:
    """The processes of the local Ray: its public interface does not name them."""
    return ray._private.worker._global_node


def _descendants_of_daemons() -> list[psutil.Process]:
    """Ray's agents: they are left to notice by themselves that their daemon has gone, which takes a minute."""
    found: list[psutil.Process] = []
    for processes in _node().all_processes.values():
        for daemon in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(daemon.process.pid).children(recursive=True)
    return found


def _resolved(reference: Any) -> bool:
    done, _ = ray.wait([reference], timeout=0)
    return bool(done)


def _ending(run: Any) -> str:
    try:
        ray.get(run)
    except ray.exceptions.ActorDiedError:
        return "died without a word (often the kernel, out of memory)"
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]
    return "ended"
