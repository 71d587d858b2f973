"""A local cluster on paced engines, and clients that replay a workload on it: what `simulator_live.py` measures.

Processes are started by the entry contract of workers and fronts: a config as JSON on stdin, a `ready` line on stdout,
SIGTERM to end.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import msgspec
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.core.links import PRIOR
from segue.config import AdmissionConfig, Config, EngineConfig, FrontConfig, ModelConfig, SchedulerConfig, WorkerConfig
from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.manifest import Role
from simulator.prompt_tokens import PromptTokens
from simulator.workload import Workload, WorkloadRequest
from worker_runtime.toy_engine import SLOT_BYTES, VOCAB_SIZE

HERE = Path(__file__).parent
START_S_MAX = 90.0
STOP_S_MAX = 30.0
REQUEST_S_MAX = 300.0
SETTLED_S = 2.0
"""For load reports and events to have reached the Conductor before the first request."""

COST = CostModel(
    prefill=PrefillCost(base_us=20_000.0, token_us=1_600.0, pair_us=0.1, floor_us=80_000.0),
    decode=DecodeCost(base_us=80_000.0, row_us=2_000.0, kv_token_us=4.0),
    kv_token_bytes=SLOT_BYTES,
)
"""Of no particular machine: two prefill instances are about half busy, and steps last a tenth of a second."""

LINK = PRIOR
"""What a live Conductor believes of links before it has seen any; the toy model's pages are too small to show more."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    prefill: int
    decode: int
    block_size: int
    pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 16_384


class Measured(msgspec.Struct, frozen=True):
    """One request as its client saw it, live or simulated."""

    ttft_s: float
    tpot_ms: float
    tokens_cached: int
    prefill: str
    """Who computed its prompt: the decode instance where that did it itself."""
    decode: str


def replay(workload: Workload, policy: str, shape: Shape) -> tuple[list[Measured], float]:
    """What each request's client saw, and by which share of engine time steps were late."""
    with tempfile.TemporaryDirectory(prefix="segue-live-") as folder:
        return asyncio.run(_replay(workload, policy, shape, Path(folder)))


async def _replay(workload: Workload, policy: str, shape: Shape, folder: Path) -> tuple[list[Measured], float]:
    cost_file = folder / "cost.json"
    cost_file.write_bytes(msgspec.json.encode(COST))
    config = FrontConfig(
        grpc_port=0,
        http_port=0,
        model_names=("toy",),
        log_level="warning",
        admission=AdmissionConfig(cost_model=str(cost_file)),
    )
    front = await Child.start("front", [str(HERE / "live_policy_front.py"), policy], config, folder)
    workers: list[Child] = []
    try:
        address = (await front.ready())["grpc"]
        roles = [(Role.PREFILL, n) for n in range(shape.prefill)] + [(Role.DECODE, n) for n in range(shape.decode)]
        for role, number in roles:
            command = [str(HERE / "live_paced_worker.py"), role.value, str(cost_file)]
            made = _worker_config(f"{role.value}-{number}", role, address, shape, folder)
            workers.append(await Child.start(made.name, command, made, folder))
        for worker in workers:
            await worker.ready()
        await asyncio.sleep(SETTLED_S)
        measured = await _run_clients(workload, address)
    finally:
        ends = [await worker.stop() for worker in workers]
        await front.stop()
    busy_s = sum(end["busy_s"] for end in ends)
    return measured, sum(end["late_s"] for end in ends) / max(busy_s, 1e-9)


def _worker_config(name: str, role: Role, front: str, shape: Shape, folder: Path) -> WorkerConfig:
    return WorkerConfig(
        uuid=f"uuid-{name}",
        name=name,
        role=role,
        model=ModelConfig(path="toy", name="toy", max_model_len=shape.max_model_len),
        engine=EngineConfig(pages=shape.pages, block_size=shape.block_size, device="cpu", threads=1),
        scheduler=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=shape.max_num_batched_tokens, tokens_saturating=0
        ),
        conductors=(front,),
        runtime_dir=str(folder),
        shm_prefix=folder.name,
    )


class Child:
    """A process by the entry contract; its stderr goes to a file in `folder`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, name: str, command: list[str], config: Config, folder: Path) -> Child:
        log, pipe = folder / f"{name}.log", asyncio.subprocess.PIPE
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", *command, stdin=pipe, stdout=pipe, stderr=stderr
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        await process.stdin.drain()
        return cls(name, process, log)

    async def ready(self) -> dict[str, str]:
        return dict((await self._said(START_S_MAX))["ready"])

    async def stop(self) -> dict[str, float]:
        """What it says at its end: empty where it says nothing. Killed when it does not end."""
        if self._process.returncode is None:
            self._process.terminate()
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(STOP_S_MAX):
                rest = await self._process.stdout.read()
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            raise
        return dict(msgspec.json.decode(rest)) if rest.strip() else {"busy_s": 0.0, "late_s": 0.0}

    async def _said(self, seconds_max: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds_max):
            line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} did not start:\n{self._log.read_text()[-2000:]}")
        return dict(msgspec.json.decode(line))


async def _run_clients(workload: Workload, address: str) -> list[Measured]:
    tokens = PromptTokens(workload)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        begin_s = time.monotonic()
        calls = [
            asyncio.create_task(_call(stub, begin_s, request, tokens.token_ids(index)))
            for index, request in enumerate(workload.requests)
        ]
        return list(await asyncio.gather(*calls))


async def _call(stub: Any, begin_s: float, request: WorkloadRequest, token_ids: bytes) -> Measured:
    """Send when it is due. Raises AssertionError for an answer that is not as long as the workload says."""
    message = inference_pb2.GenerateRequest()
    ids = struct.unpack(f"<{len(token_ids) // 4}I", token_ids)
    assert max(ids) < VOCAB_SIZE, "the toy model has fewer tokens"
    message.tokens.ids.extend(ids)
    message.sampling.max_tokens, message.sampling.ignore_eos, message.sampling.seed = request.tokens_output, True, 1
    await asyncio.sleep(max(0.0, begin_s + request.arrival_us / 1e6 - time.monotonic()))
    sent_s, times_s, last = time.monotonic(), [], None
    async for response in stub.Generate(message, timeout=REQUEST_S_MAX):
        if response.WhichOneof("event") == "delta":
            times_s += [time.monotonic()] * len(response.delta.token_ids)
        elif response.WhichOneof("event") == "finished":
            last = response.finished
    assert last is not None and len(times_s) == request.tokens_output, (
        f"{len(times_s)} tokens instead of {request.tokens_output}"
    )
    tpot_ms = (times_s[-1] - times_s[0]) / max(len(times_s) - 1, 1) * 1e3
    prefill, decode = last.prefill_instance or last.decode_instance, last.decode_instance
    return Measured(times_s[0] - sent_s, tpot_ms, last.usage.tokens_cached, prefill, decode)
