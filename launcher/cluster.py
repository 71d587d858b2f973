"""One cluster from start to the last trace of it: Conductor + gateway as a child, instances in a pool.

Order matters. The front starts first, because workers dial it. It is told first to stop, so that requests are answered
with that, and ends last, so that workers can say goodbye.
Whatever happens, and however far the start got, `stop` ends every process and then removes the runtime folder and the
shared memory; nothing of a cluster outlives its launcher.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import httpx
import msgspec

from launcher.cluster_plan import plan_front, plan_workers
from launcher.host_facts import HostFacts
from launcher.instance_pool import Death, InstancePool
from launcher.processes import POLL_SECONDS, ChildProcess, LocalProcesses, stop_children, thread_environment
from launcher.progress import Progress
from launcher.ray_environment import prepare_ray_environment
from launcher.runtime_dir import RuntimeDir
from launcher.tending import Tender
from segue.config import ClusterConfig, WorkerConfig
from segue.errors import SegueError

START_SECONDS_MAX = 600.0
"""Loading tens of GB from a cold disk takes minutes; what takes longer is stuck."""


class StartFailed(SegueError):
    """The cluster did not come up; the message has the reason and the end of the log that tells."""


class StartInterrupted(SegueError):
    """Whoever started the cluster wants it to stop before it was up."""


class Endpoints(msgspec.Struct, frozen=True):
    """`host:port` of both servers, as workers and clients reach them."""

    grpc: str
    http: str
    model: str


class Cluster:
    """`start` once, then `tend` again and again, then `stop`; `stop` is right after a failed start too."""

    def __init__(
        self,
        config: ClusterConfig,
        host: HostFacts,
        *,
        progress: Progress,
        interrupted: threading.Event,
        logs: Path | None = None,
    ) -> None:
        self._config = config
        self._host = host
        self._progress = progress
        self._interrupted = interrupted
        self._front_config = plan_front(config)
        self._runtime = RuntimeDir()
        self._logs = logs or self._runtime.logs
        self._front: ChildProcess | None = None
        self._pool: InstancePool | None = None
        self._tender: Tender | None = None

    @property
    def runtime_dir(self) -> Path:
        return self._runtime.path

    def start(self) -> Endpoints:
        """Bring everything up; raise StartFailed, or StartInterrupted once `interrupted` is set."""
        self._logs.mkdir(parents=True, exist_ok=True)
        endpoints = self._start_front()
        workers = plan_workers(
            self._config,
            self._host,
            cluster=self._runtime.cluster,
            conductor=endpoints.grpc,
            runtime_dir=str(self._runtime.path),
        )
        pool = self._start_pool(workers)
        self._await_model(endpoints)
        self._tender = Tender(pool, workers, endpoints.grpc, self._progress.say)
        return endpoints

    def _start_front(self) -> Endpoints:
        with self._progress.working("starting the Conductor and its gateway"):
            self._front = ChildProcess(
                "front", "conductor.app", self._front_config, logs=self._logs, environment=thread_environment(1)
            )
            while (ready := self._front.ready()) is None:
                self._check_alive()
        self._progress.done(f"Conductor and gateway serve (pid {self._front.pid})")
        (model,) = self._front_config.model_names
        return Endpoints(grpc=ready["grpc"], http=ready["http"], model=model)

    def _start_pool(self, workers: list[WorkerConfig]) -> InstancePool:
        pool = self._pool = self._make_pool(workers)
        if not self._config.local_processes:
            with self._progress.working("starting a local Ray"):
                pool.start()
            self._progress.done("local Ray is up")
        else:
            pool.start()
        missing = [worker.name for worker in workers]
        deadline = time.monotonic() + START_SECONDS_MAX
        while missing:
            with self._progress.working(f"loading the model: {', '.join(missing)}"):
                while not (ready := pool.ready().intersection(missing)):
                    self._check_alive(deadline)
            for name in sorted(ready):
                self._progress.done(f"{name} is ready")
            missing = [name for name in missing if name not in ready]
        return pool

    def _make_pool(self, workers: list[WorkerConfig]) -> InstancePool:
        if self._config.local_processes:
            return LocalProcesses(workers, logs=self._logs)
        prepare_ray_environment(max(worker.engine.threads for worker in workers))
        from launcher.ray_pool import RayPool  # optional, slow to import, and reads the environment when it is

        return RayPool(workers, runtime_dir=self._runtime.path, logs=self._logs)

    def _await_model(self, endpoints: Endpoints) -> None:
        """The Conductor offers a model once a usable set of instances has registered and sent the model's card."""
        url = f"http://{endpoints.http}/v1/models"
        deadline = time.monotonic() + START_SECONDS_MAX
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while endpoints.model not in [entry["id"] for entry in client.get(url).raise_for_status().json()["data"]]:
                self._check_alive(deadline)

    def _check_alive(self, deadline: float | None = None) -> None:
        """One pause of a start-up loop; raises when there is nothing to wait for any more."""
        if self._interrupted.wait(POLL_SECONDS):
            raise StartInterrupted("stopped while starting")
        if (death := self._first_death()) is not None:
            raise StartFailed(describe(death))
        if deadline is not None and time.monotonic() > deadline:
            raise StartFailed(f"not ready after {START_SECONDS_MAX:.0f} s; see the logs with --log-dir")

    def _first_death(self) -> Death | None:
        front = self._front.death() if self._front else None
        return front or next(iter(self._pool.deaths() if self._pool else ()), None)

    def tend(self) -> Death | None:
        """One round of the watch over a started cluster: dead and hung instances are replaced. Returns the death that
        the cluster cannot go on after: the front's, or that of the last instance that could serve."""
        assert self._front is not None and self._tender is not None
        return self._front.death() or self._tender.tend()

    def stop(self) -> None:
        try:
            if self._tender is not None:
                self._tender.close()
            if self._front is not None:
                self._front.send(signal.SIGTERM)  # from now on requests are told that the cluster ends
            if self._pool is not None:
                self._pool.stop()
            if self._front is not None:
                stop_children([self._front])
        finally:
            self._runtime.remove()


def describe(death: Death) -> str:
    tail = f"; the end of its log:\n\n{death.log_tail}\n" if death.log_tail else "; its log is empty"
    return f"{death.name} {death.reason}{tail}"
