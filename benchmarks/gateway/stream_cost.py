"""CPU time of the gateway per relayed token: N client streams fed by one TokenLink stream, in steps as a decode batch.

The server runs in this process and the load in a child, so that only the gateway's own work is counted. `relay` is the
floor for gRPC: the same batches in and the same messages out with grpc.aio and nothing else. The fronts alternate and
medians are kept: CPU time too grows on a busy machine, by half and more, so there the share of the floor of the same
round is what to compare.

    python benchmarks/gateway/stream_cost.py [--front http grpc relay] [--streams 1 8 64 256] [--steps 300] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvicorn
from segue_proto.v1 import inference_pb2, worker_pb2

from conductor.gateway.server import build_gateway
from conductor.gateway.testing import FakeConductor, Script, toy_card
from segue.config import FrontConfig
from segue.wire_version import METADATA_KEY, WIRE_VERSION

sys.path.insert(0, str(Path(__file__).parents[1]))  # the script folder is all that is on the path
from result_rows import RESULTS, ResultFile, cpu_device

FRONTS = ("http", "grpc", "relay")
TOKEN = 104
STEP_S = 0.02


class BareRelay:
    """What `relay` runs instead of the gateway: a queue for each stream, and nothing is looked at."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[bytes | None]] = {}

    def __len__(self) -> int:
        return len(self.queues)

    def handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "Push": grpc.stream_stream_rpc_method_handler(self.push, request_deserializer=parse_batch),
        }
        return grpc.method_handlers_generic_handler("Relay", methods)

    async def generate(self, body: bytes, context: object) -> AsyncIterator[bytes]:
        name = inference_pb2.GenerateRequest.FromString(body).request_id
        queue = self.queues[name] = asyncio.Queue()
        while (message := await queue.get()) is not None:
            yield message
        del self.queues[name]

    async def push(self, batches: AsyncIterator[worker_pb2.TokenBatch], context: object) -> AsyncIterator[bytes]:
        async for batch in batches:
            for delta in batch.deltas:
                answer = inference_pb2.Delta(token_ids=delta.token_ids, text="h")
                queue = self.queues[delta.request_id]
                queue.put_nowait(inference_pb2.GenerateResponse(delta=answer).SerializeToString())
                if delta.finish:
                    queue.put_nowait(None)
        yield b""


def parse_batch(body: bytes) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch.FromString(body)


async def read_http(port: int, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": [1], "max_tokens": 4000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tail = b""
    while b"[DONE]" not in tail:
        part = await reader.read(65536)
        if not part:
            raise RuntimeError("stream broke")
        tail = (tail + part)[-64:]
    writer.close()


async def read_grpc(channel: grpc.aio.Channel, service: str, name: str) -> None:
    request = inference_pb2.GenerateRequest(
        request_id=name,
        tokens=inference_pb2.TokenIds(ids=[1]),
        sampling=inference_pb2.SamplingParams(max_tokens=4000),
    )
    async for _ in channel.unary_stream(f"/{service}/Generate")(request.SerializeToString()):
        pass


async def drive(front: str, grpc_port: int, http_port: int, streams: int, steps: int, ids: Connection) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        service, link = ("Relay", "Relay") if front == "relay" else ("segue.v1.Inference", "segue.v1.TokenLink")
        names = [f"r{index}" for index in range(streams)]
        reads = [read_http(http_port, name) if front == "http" else read_grpc(channel, service, name) for name in names]
        tasks = [asyncio.create_task(read) for read in reads]
        wire_ids = await asyncio.to_thread(ids.recv)
        push = channel.stream_stream(f"/{link}/Push")(metadata=((METADATA_KEY, str(WIRE_VERSION)),))
        for step in range(steps):
            finish = inference_pb2.FINISH_REASON_LENGTH if step == steps - 1 else 0
            deltas = [
                worker_pb2.TokenDelta(
                    request_id=wire_id, attempt=1, position=1 + step, token_ids=[TOKEN], finish=finish
                )
                for wire_id in wire_ids
            ]
            batch = worker_pb2.TokenBatch(ref=worker_pb2.InstanceRef(uuid="d"), name="d0", deltas=deltas)
            await push.write(batch.SerializeToString())
            await asyncio.sleep(STEP_S)
        await asyncio.gather(*tasks)
        await push.done_writing()


def load(front: str, grpc_port: int, http_port: int, streams: int, steps: int, ids: Connection) -> None:
    asyncio.run(drive(front, grpc_port, http_port, streams, steps, ids))


async def serve(front: str, streams: int, steps: int) -> float:
    """CPU microseconds per token."""
    conductor = FakeConductor([toy_card(max_model_len=8192)], lambda request: Script(hang=True))
    gateway, relay = build_gateway(FrontConfig(), conductor), BareRelay()
    server = grpc.aio.server()
    gateway.add_to(server)
    server.add_generic_rpc_handlers((relay.handlers(),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await gateway.start(f"127.0.0.1:{grpc_port}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(gateway.http_app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(http.serve([listener]))
        ports = (grpc_port, listener.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        ids, ids_of_child = context.Pipe()
        child = context.Process(target=load, args=(front, *ports, streams, steps, ids_of_child))
        child.start()
        live = relay if front == "relay" else gateway.table
        while len(live) < streams and child.is_alive():
            await asyncio.sleep(0.01)
        ids.send(list(relay.queues) or [request.request_id for request in conductor.submitted])
        before_s = time.process_time()
        while len(live):
            await asyncio.sleep(0.1)
        cpu_s = time.process_time() - before_s
        await asyncio.to_thread(child.join)
        if child.exitcode:
            raise RuntimeError(f"the load of {front} ended with {child.exitcode}")
        await gateway.close()
        http.should_exit = True
        await serving
        await server.stop(0)
    return cpu_s / (streams * steps) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", nargs="+", choices=FRONTS, default=FRONTS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    command = f"python benchmarks/gateway/stream_cost.py --steps {options.steps} --rounds {options.rounds}"
    rows = ResultFile(RESULTS / "gateway_cost.csv", device=cpu_device(os.cpu_count() or 1), command=command)
    for streams in options.streams:
        costs: dict[str, list[float]] = {front: [] for front in options.front}
        for _ in range(options.rounds):
            for front in options.front:
                costs[front].append(asyncio.run(serve(front, streams, options.steps)))
        for front in options.front:
            rows.add(f"{streams} streams", front, statistics.median(costs[front]), "us CPU/token")
        for front in sorted({"http", "grpc"} & costs.keys()) if "relay" in costs else ():
            shares = [own / floor for own, floor in zip(costs[front], costs["relay"], strict=True)]
            rows.add(f"{streams} streams", f"{front} over relay", 100 * statistics.median(shares), "%")


if __name__ == "__main__":
    main()
