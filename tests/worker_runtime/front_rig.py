"""A minimal Conductor and gateway for tests of real workers: both gRPC services; the test decides everything."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
from segue_proto import convert
from segue_proto.v1 import worker_pb2, worker_pb2_grpc

from segue.block_hash import token_bytes
from segue.config import EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from segue.ids import AttemptRef
from segue.manifest import InstanceManifest, Role
from segue.model_card import ModelCard
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, CancelAttempt, Outcome, OutcomeKind, Peer, TokenDelta

HERE = Path(__file__).parent
WAIT_S = 60


class Registered:
    """One worker's control stream."""

    def __init__(self, manifest: InstanceManifest) -> None:
        self.manifest = manifest
        self.outbox: asyncio.Queue[worker_pb2.ConductorMessage] = asyncio.Queue()
        self.gone = asyncio.Event()

    @property
    def peer(self) -> Peer:
        return Peer(ref=self.manifest.ref, name=self.manifest.name, control_address=self.manifest.control_address)


class Front(worker_pb2_grpc.WorkerControlServicer, worker_pb2_grpc.TokenLinkServicer):
    def __init__(self, name: str = "front") -> None:
        self.name = name
        self.workers: dict[str, Registered] = {}
        self.cards: dict[str, ModelCard] = {}
        self.outcomes: dict[AttemptRef, list[Outcome]] = defaultdict(list)
        self.deltas: dict[AttemptRef, list[TokenDelta]] = defaultdict(list)
        self.beats = 0
        self.token_streams = 0
        self.cut_tokens_after: int | None = None
        """Break a token stream after this many batches, once."""
        self._changed = asyncio.Condition()
        self._server: Any = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerControlServicer_to_server(self, self._server)
        worker_pb2_grpc.add_TokenLinkServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)

    # -- services

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(aiter(requests))
        worker = Registered(msgspec.msgpack.decode(first.register.manifest, type=InstanceManifest))
        known = worker.manifest.card_digest in self.cards
        await self._change(self.workers.__setitem__, worker.manifest.name, worker)
        registered = worker_pb2.Registered(need_card=not known, heartbeat_ms=500, conductor=self.name)
        worker.outbox.put_nowait(worker_pb2.ConductorMessage(registered=registered))
        reader = asyncio.create_task(self._read(requests, worker))
        try:
            while True:
                yield await worker.outbox.get()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any], worker: Registered) -> None:
        try:
            async for message in requests:
                await self._change(self._take, message)
        finally:
            worker.gone.set()

    def _take(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "outcome":
            outcome = convert.outcome_from_pb(message.outcome)
            self.outcomes[AttemptRef(outcome.request_id, outcome.attempt)].append(outcome)
        elif kind == "card":
            self.cards[message.card.digest] = msgspec.msgpack.decode(message.card.card, type=ModelCard)
        elif kind == "heartbeat":
            self.beats += 1

    async def Push(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        batches = 0
        await self._change(setattr, self, "token_streams", self.token_streams + 1)
        async for batch in requests:
            batches += 1
            for delta in map(convert.delta_from_pb, batch.deltas):
                await self._change(self.deltas[AttemptRef(delta.request_id, delta.attempt)].append, delta)
            if self.cut_tokens_after == batches:
                self.cut_tokens_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            yield worker_pb2.TokenAck(batches=batches)

    async def _change(self, function: Any, *arguments: Any) -> None:
        async with self._changed:
            function(*arguments)
            self._changed.notify_all()

    # -- what a test does

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def registered(self, *names: str) -> None:
        await self.until(lambda: all(name in self.workers for name in names))

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        prefill: str,
        decode: str,
        attempt: int = 1,
    ) -> AttemptRef:
        p, d = self.workers.get(prefill), self.workers[decode]
        assign = Assign(
            request_id=request_id,
            attempt=attempt,
            gateway=self.address,
            token_ids=token_bytes(prompt),
            tokens_prompt=len(prompt),
            sampling=sampling,
            prefill=None if p is None else p.peer,
            decode=d.peer,
            hash_root=bytes.fromhex(d.manifest.kv_root),
        )
        for worker in (p, d):
            if worker is not None:
                worker.outbox.put_nowait(worker_pb2.ConductorMessage(assign=convert.assign_to_pb(assign)))
        return assign.key

    def cancel(self, name: str, key: AttemptRef) -> None:
        cancel = CancelAttempt(request_id=key.request_id, attempt=key.attempt, reason="client gone")
        self.workers[name].outbox.put_nowait(worker_pb2.ConductorMessage(cancel=convert.cancel_to_pb(cancel)))

    def kinds(self, key: AttemptRef) -> list[OutcomeKind]:
        return [outcome.kind for outcome in self.outcomes[key]]

    def finish(self, key: AttemptRef) -> str:
        return next((delta.finish for delta in self.deltas[key] if delta.finish), "")

    def generated(self, key: AttemptRef) -> list[int]:
        """Tokens by position; positions said twice must agree."""
        tokens: dict[int, int] = {}
        for delta in self.deltas[key]:
            for offset, token in enumerate(delta.token_ids):
                assert tokens.setdefault(delta.position + offset, token) == token
        return [token for _, token in sorted(tokens.items())]


class WorkerProcess:
    """A worker as a child process, by the entry contract: JSON in, a ready line out, SIGTERM to end."""

    def __init__(self, config: WorkerConfig, command: list[str]) -> None:
        self.config = config
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self.config) + b"\n")
        await self._process.stdin.drain()

    async def ready(self) -> dict[str, str]:
        assert self._process is not None and self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WAIT_S)
        return dict(msgspec.json.decode(line)["ready"])

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    async def stop(self) -> int:
        """Exit status after SIGTERM (or of a process that has ended already)."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), WAIT_S)


def worker_config(front: Front, role: Role, runtime_dir: Path, **changes: Any) -> WorkerConfig:
    config = WorkerConfig(
        uuid=f"uuid-{role.value}",
        name=f"{role.value}-0",
        role=role,
        model=ModelConfig(path="toy", name="toy"),
        engine=EngineConfig(pages=64, block_size=4, device="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, handoff_lease_ms=5_000),
        conductors=(front.address,),
        runtime_dir=str(runtime_dir),
        shm_prefix=f"seguetest-{runtime_dir.name}",
    )
    return msgspec.structs.replace(config, **changes)


def toy_command(role: Role) -> list[str]:
    return [sys.executable, str(HERE / "toy_worker.py"), role.value]


def real_command(role: Role) -> list[str]:
    return [sys.executable, "-m", "prefill_worker.app" if role is Role.PREFILL else "decode_worker.app"]
