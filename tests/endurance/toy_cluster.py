"""A front and toy instances as real processes, and clients that check every token of every stream."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
from segue_proto.v1 import inference_pb2, inference_pb2_grpc
from toy_instance import FAIL_FILE_VARIABLE, HANG_FILE_VARIABLE, STEP_MS_VARIABLE

from launcher.fronts import FrontAddress, Fronts
from launcher.host_facts import SHARED_MEMORY
from launcher.instance_pool import Death
from launcher.processes import LocalProcesses
from launcher.supervision import RestartLimits
from launcher.tending import Tender
from segue.config import DirectoryConfig, EngineConfig, FrontConfig, ModelConfig, SchedulerConfig, WorkerConfig
from segue.manifest import Role

HERE = Path(__file__).parent
START_SECONDS_MAX = 60.0
BLOCK_SIZE = 4
LEASE_MS = 2_000
TEND_SECONDS = 0.05

IMPATIENT = RestartLimits(stable_us=1, backoff_first_us=100_000, backoff_us_max=1_000_000, deaths_max=1_000)
"""Killed again and again on purpose, also while it starts: no slot is given up, and none waits long."""

InferenceStub = inference_pb2_grpc.InferenceStub


def worker_config(
    name: str,
    role: Role,
    *,
    conductor: str,
    directory: DirectoryConfig,
    folder: Path,
    prefix: str,
    pages: int,
    drain_s: float,
) -> WorkerConfig:
    return WorkerConfig(
        uuid=uuid.uuid4().hex,
        name=name,
        role=role,
        model=ModelConfig(path="toy", name="toy"),
        engine=EngineConfig(pages=pages, block_size=BLOCK_SIZE, device="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, handoff_lease_ms=5_000, drain_s=drain_s),
        conductors=(conductor,),
        directory=directory,
        runtime_dir=str(folder),
        shm_prefix=prefix,
    )


def toy_environment(step_ms: float, fail_file: Path, hang_file: Path) -> dict[str, str]:
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        STEP_MS_VARIABLE: str(step_ms),
        FAIL_FILE_VARIABLE: str(fail_file),
        HANG_FILE_VARIABLE: str(hang_file),
    }


def wait_for(what: Callable[[], Any], seconds_max: float = START_SECONDS_MAX) -> Any:
    deadline = time.monotonic() + seconds_max
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


class ToyCluster:
    """`prefill` + `decode` instances behind `conductors` fronts, tended as the launcher does it; `close` ends and reaps
    all. Instances are told of the first front, which `grpc` and `http` name; `conductor` turns its address into
    the one that they dial for their control streams."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        pages: int = 4096,
        step_ms: float = 2.0,
        drain_s: float = 30.0,
        limits: RestartLimits = IMPATIENT,
        conductor: Callable[[str], str] = str,
        conductors: int = 1,
        redis_url: str = "",
    ) -> None:
        self.prefix = f"seguetest-{uuid.uuid4().hex[:8]}"
        self.fail_file, self.hang_file = folder / "who-fails", folder / "who-hangs"
        self.said: list[str] = []
        environment = toy_environment(step_ms, self.fail_file, self.hang_file)
        directory = DirectoryConfig(redis_url=redis_url, cluster=self.prefix, lease_ms=LEASE_MS)
        config = FrontConfig(grpc_port=0, http_port=0, model_names=("toy",), log_level="warning", directory=directory)
        self.fronts = Fronts([config] * conductors, folder, self.said.append, limits)
        self.front_log = folder / "front.log"
        self.fronts.start()
        self.addresses: list[FrontAddress] = wait_for(self.fronts.addresses)
        self.grpc, self.http = self.addresses[0].grpc, self.addresses[0].http
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        self.workers = [
            worker_config(
                name,
                role,
                conductor=conductor(self.grpc),
                directory=directory,
                folder=folder,
                prefix=self.prefix,
                pages=pages,
                drain_s=drain_s,
            )
            for slot, role in enumerate(roles)
            for name in (f"{role.value}-{roles[:slot].count(role)}",)
        ]
        modules = dict.fromkeys(Role, "toy_instance")
        self.pool = LocalProcesses(self.workers, logs=folder, modules=modules, environment=environment)
        self.pool.start()
        wait_for(lambda: len(self.pool.ready()) == len(roles))
        self.tender = Tender(
            self.pool, self.workers, [address.grpc for address in self.addresses], self.said.append, limits
        )
        self.ended: Death | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="tender")
        self._thread.start()

    def _tend(self) -> None:
        while self.ended is None and not self._stop.wait(TEND_SECONDS):
            self.ended = self.fronts.tend() or self.tender.tend()

    def pids(self) -> dict[str, int]:
        """Of instances that serve, by name."""
        dead = {death.name for death in self.pool.deaths()}
        return {name: self.pool.pid(name) for name in sorted(self.pool.ready() - dead)}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.tender.close()
        self.pool.stop()
        self.fronts.stop()
        for segment in shared_memory_of(self.prefix):
            segment.unlink()


@contextmanager
def toy_cluster(folder: Path, **options: Any) -> Iterator[ToyCluster]:
    cluster = ToyCluster(folder, **options)
    try:
        yield cluster
    finally:
        cluster.close()


def shared_memory_of(prefix: str) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(prefix + "*"))


async def view(stub: Any) -> inference_pb2.GetClusterResponse:
    return await stub.GetCluster(inference_pb2.GetClusterRequest(), timeout=20)


def pages_in_use(cluster: inference_pb2.GetClusterResponse) -> int:
    return sum(
        instance.pages_active + instance.pages_held + instance.pages_quarantined for instance in cluster.instances
    )


def booked(http: str) -> float:
    """Everything that the Conductor still holds for requests: bookings, and requests live or queued."""
    text = httpx.get(f"http://{http}/metrics", trust_env=False).raise_for_status().text
    names = ("segue:instance_booked", "segue:num_requests_")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))


def request_of(prompt: list[int], tokens_max: int, seed: int = 0, request_id: str = "") -> Any:
    request = inference_pb2.GenerateRequest(request_id=request_id)
    request.tokens.ids.extend(prompt)
    request.sampling.max_tokens, request.sampling.seed, request.sampling.ignore_eos = tokens_max, seed, True
    return request


class Stream(msgspec.Struct):
    """What one client has seen. `at_s` are arrival times (monotonic) of the pieces, `finished` the last message."""

    tokens: list[int] = []
    at_s: list[float] = []
    finished: inference_pb2.Finished | None = None


async def follow(stub: Any, request: Any, stream: Stream, timeout_s: float = 120.0) -> Stream:
    """Read a stream to its end. A cancelled task cancels its call, also where grpc.aio has not begun to read: it would
    go on until the garbage collector finds the call."""
    call = stub.Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            match response.WhichOneof("event"):
                case "delta":
                    stream.tokens += response.delta.token_ids
                    stream.at_s.append(time.monotonic())
                case "finished":
                    stream.finished = response.finished
    finally:
        call.cancel()
    return stream


async def idle_within(stub: Any, seconds_max: float) -> float | None:
    """Seconds until no page of any instance is in use; None when that did not happen in time."""
    start = time.monotonic()
    while pages_in_use(await view(stub)):
        if time.monotonic() - start > seconds_max:
            return None
        await asyncio.sleep(0.02)
    return time.monotonic() - start


def channel(address: str) -> grpc.aio.Channel:
    """Looks for a server that was away often: the default waits longer each time."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 300)]
    return grpc.aio.insecure_channel(address, options=options)
