"""One cluster from start to the last trace of it: Conductor + gateway as a child, instances in a pool.

Order matters. The front starts first, because workers dial it. It is told first to stop, so that requests are answered
with that, and ends last, so that workers can say goodbye.
Whatever happens, and however far the start got, `stop` ends every process and then removes the runtime folder and the
shared memory; nothing of a cluster outlives its launcher.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import msgspec

from launcher.cluster_plan import plan_fronts, plan_workers
from launcher.directory_check import check_directory
from launcher.fronts import FrontAddress, Fronts
from launcher.host_facts import HostFacts
from launcher.instance_pool import Death, InstancePool
from launcher.processes import POLL_SECONDS, LocalProcesses
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
    others: tuple[FrontAddress, ...] = ()
    """Of further fronts, each as good as the first."""


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
        plan_fronts(config)  # what was asked for is refused before anything is made
        self._runtime = RuntimeDir()
        self._logs = logs or self._runtime.logs
        self._fronts: Fronts | None = None
        self._pool: InstancePool | None = None
        self._tender: Tender | None = None

    @property
    def runtime_dir(self) -> Path:
        return self._runtime.path

    def start(self) -> Endpoints:
        """Bring everything up; raise StartFailed, or StartInterrupted once `interrupted` is set."""
        self._logs.mkdir(parents=True, exist_ok=True)
        endpoints = self._start_fronts()
        grpc = [endpoints.grpc, *(other.grpc for other in endpoints.others)]
        workers = plan_workers(
            self._config,
            self._host,
            cluster=self._runtime.cluster,
            conductors=grpc,
            runtime_dir=str(self._runtime.path),
        )
        pool = self._start_pool(workers)
        self._await_model(endpoints)
        self._tender = Tender(pool, workers, grpc, self._progress.say)
        return endpoints

    def _start_fronts(self) -> Endpoints:
        configs = plan_fronts(self._config, self._runtime.cluster)
        check_directory(configs[0].directory)
        with self._progress.working("starting the Conductor and its gateway"):
            fronts = self._fronts = Fronts(configs, self._logs, self._progress.say)
            fronts.start()
            while (addresses := fronts.addresses()) is None:
                self._check_alive()
        pids = ", ".join(str(pid) for pid in fronts.pids().values())
        self._progress.done(f"Conductor and gateway serve (pid {pids})")
        (model,) = configs[0].model_names
        first, *others = addresses
        return Endpoints(grpc=first.grpc, http=first.http, model=model, others=tuple(others))

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
        deadline = time.monotonic() + START_SECONDS_MAX
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            for http in (endpoints.http, *(other.http for other in endpoints.others)):
                url = f"http://{http}/v1/models"
                while endpoints.model not in [
                    entry["id"] for entry in client.get(url).raise_for_status().json()["data"]
                ]:
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
        front = self._fronts.first_death() if self._fronts else None
        pool = self._pool.failure() if self._pool and not front else None
        return front or pool or next(iter(self._pool.deaths() if self._pool else ()), None)

    def tend(self) -> Death | None:
        """One round of the watch over a started cluster: dead and hung instances are replaced. Returns the death that
        the cluster cannot go on after: that of the last front, or of the last instance that could serve."""
        assert self._fronts is not None and self._tender is not None
        return self._fronts.tend() or self._tender.tend()

    def stop(self) -> None:
        try:
            if self._tender is not None:
                self._tender.close()
            if self._fronts is not None:
                self._fronts.announce_end()  # from now on requests are told that the cluster ends
            if self._pool is not None:
                self._pool.stop()
            if self._fronts is not None:
                self._fronts.stop()
        finally:
            self._runtime.remove()


def describe(death: Death) -> str:
    tail = f"; the end of its log:\n\n{death.log_tail}\n" if death.log_tail else "; its log is empty"
    return f"{death.name} {death.reason}{tail}"
