"""A Conductor with its real gRPC server, a worker that speaks the wire, a gateway that writes down what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
from segue_proto.convert import outcome_to_pb
from segue_proto.v1 import worker_pb2, worker_pb2_grpc

from conductor.control_loop import ControlLoop
from conductor.core.machine import ConductorCore
from conductor.ports import Placement, RoutedRequest
from conductor.recording import Recorder
from conductor.registry import Registry
from conductor.rpc_server import RpcServer
from conductor.rpc_workers import SERVICE_NAME, WorkerControlService
from kvstore.events_zmq import EventPublisher, EventSubscriber
from segue.errors import RequestError
from segue.kv_events import BlocksCleared, KvEvent
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard
from segue.sampling_params import SamplingParams
from segue.worker_messages import Outcome

CARD = ModelCard(
    name="toy",
    architecture="llama",
    vocab_size=32,
    max_model_len=200,
    tokenizer_json="{}",
    chat_template=None,
    digest="card",
)


class Front:
    """What a test touches of the running Conductor."""

    def __init__(self, loop: ControlLoop, core: ConductorCore, port: int) -> None:
        self.loop = loop
        self.core = core
        self.port = port


@asynccontextmanager
async def front(models: tuple[str, ...] = (), record: Path | None = None) -> AsyncIterator[Front]:
    registry, subscriber, core = Registry(models), EventSubscriber(), ConductorCore()
    recorder = Recorder(record) if record else None
    loop = ControlLoop(core, registry, subscriber, recorder=recorder)
    workers = WorkerControlService(loop, registry, "conductor-test")
    rpc = RpcServer()
    port = rpc.bind("127.0.0.1", 0)
    rpc.add_worker_control(workers)
    await rpc.start((SERVICE_NAME,))
    tasks = [asyncio.create_task(part) for part in (loop.run(), loop.read_events(), workers.watch_heartbeats())]
    try:
        yield Front(loop, core, port)
    finally:
        workers.close("test ends")
        await rpc.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        subscriber.close()
        if recorder:
            recorder.close()


class Worker:
    """One control stream, from the worker's end."""

    def __init__(self, port: int, manifest: InstanceManifest, events: EventPublisher | None = None) -> None:
        self.manifest = manifest
        self.events = events
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stream = worker_pb2_grpc.WorkerControlStub(self._channel).Attach()

    async def send(self, **body: object) -> None:
        await self._stream.write(worker_pb2.WorkerMessage(**body))  # type: ignore[arg-type]

    async def receive(self) -> worker_pb2.ConductorMessage | None:
        """The next message; None at the end of the stream."""
        message = await asyncio.wait_for(self._stream.read(), 20)
        return None if message is grpc.aio.EOF else message

    async def register(self, card: ModelCard = CARD) -> worker_pb2.ConductorMessage:
        await self.send(register=worker_pb2.Register(manifest=msgspec.msgpack.encode(self.manifest)))
        answer = await self.receive()
        assert answer is not None
        if answer.registered.need_card:
            asset = worker_pb2.ModelCardAsset(digest=card.digest, card=msgspec.msgpack.encode(card))
            await self.send(card=asset)
        return answer

    async def report(self, outcome: Outcome) -> None:
        await self.send(outcome=outcome_to_pb(outcome))

    async def close(self) -> None:
        self._stream.cancel()
        await self._channel.close()


@asynccontextmanager
async def worker(port: int, manifest: InstanceManifest, held: Sequence[KvEvent] = ()) -> AsyncIterator[Worker]:
    """A registered worker with a real event publisher that said, before it registered, what it `held`."""
    publisher = EventPublisher(manifest.ref, lambda: [BlocksCleared(), *held])
    address = publisher.bind("tcp://127.0.0.1:*")
    publisher.publish_kv(held)
    client = Worker(port, msgspec.structs.replace(manifest, events_address=address), publisher)
    try:
        await client.register()
        yield client
    finally:
        await client.close()
        publisher.close()


class HeardByGateway:
    """A GatewayPort that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def on_placed(self, request_id: str, attempt: int, placement: Placement) -> None:
        self.heard.append(("placed", request_id, attempt, placement))

    def on_attempt_failed(self, request_id: str, attempt: int, reason: str) -> None:
        self.heard.append(("failed", request_id, attempt, reason))

    def on_rejected(self, request_id: str, attempt: int, error: RequestError) -> None:
        self.heard.append(("rejected", request_id, attempt, error))

    def on_handoff_complete(self, request_id: str, attempt: int) -> None:
        self.heard.append(("handoff", request_id, attempt))


def routed(request_id: str, attempt: int = 1, tokens: int = 8, **changes: object) -> RoutedRequest:
    base = RoutedRequest(
        request_id=request_id,
        attempt=attempt,
        model="toy",
        token_ids=bytes(4 * tokens),
        tokens_prompt=tokens,
        hash_root=b"root",
        block_hashes=[bytes([n]) * 16 for n in range(tokens // 4)],
        sampling=SamplingParams(max_tokens=4),
        gateway="127.0.0.1:1",
    )
    return msgspec.structs.replace(base, **changes)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what must come; the test's own limit ends a wait for what never does."""
    while not condition():
        await asyncio.sleep(0.01)
