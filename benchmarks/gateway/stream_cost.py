"""CPU time of the gateway per relayed token: N client streams fed by one TokenLink stream, in steps as a decode batch.

The server runs in this process and the load in a child, so that only the gateway's own work is counted.

    python benchmarks/gateway/stream_cost.py --front http --streams 64 --steps 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import grpc
import uvicorn
from segue_proto.v1 import inference_pb2, worker_pb2

from conductor.gateway.server import build_gateway
from conductor.gateway.testing import FakeConductor, Script, toy_card
from segue.config import FrontConfig

TOKEN = 104
STEP_S = 0.02


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


async def read_grpc(channel: grpc.aio.Channel, name: str) -> None:
    request = inference_pb2.GenerateRequest(
        request_id=name,
        tokens=inference_pb2.TokenIds(ids=[1]),
        sampling=inference_pb2.SamplingParams(max_tokens=4000),
    )
    async for _ in channel.unary_stream("/segue.v1.Inference/Generate")(request.SerializeToString()):
        pass


async def drive(front: str, grpc_port: int, http_port: int, streams: int, steps: int, ids: Connection) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        reads = [
            read_http(http_port, f"r{index}") if front == "http" else read_grpc(channel, f"r{index}")
            for index in range(streams)
        ]
        tasks = [asyncio.create_task(read) for read in reads]
        wire_ids = await asyncio.to_thread(ids.recv)
        push = channel.stream_stream("/segue.v1.TokenLink/Push")()
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


async def serve(arguments: argparse.Namespace) -> None:
    conductor = FakeConductor([toy_card(max_model_len=8192)], lambda request: Script(hang=True))
    gateway = build_gateway(FrontConfig(), conductor)
    server = grpc.aio.server()
    gateway.add_to(server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await gateway.start(f"127.0.0.1:{grpc_port}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(gateway.http_app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(http.serve([listener]))
        ports = (grpc_port, listener.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        ids, ids_of_child = context.Pipe()
        child = context.Process(
            target=load, args=(arguments.front, *ports, arguments.streams, arguments.steps, ids_of_child)
        )
        child.start()
        while len(gateway.table) < arguments.streams:
            await asyncio.sleep(0.01)
        ids.send([request.request_id for request in conductor.submitted])
        before_s = time.process_time()
        while len(gateway.table):
            await asyncio.sleep(0.1)
        cpu_s = time.process_time() - before_s
        await asyncio.to_thread(child.join)
        await gateway.close()
        http.should_exit = True
        await serving
        await server.stop(0)
    tokens = arguments.streams * arguments.steps
    print(f"{arguments.front},{arguments.streams},{arguments.steps},{cpu_s / tokens * 1e6:.1f} us CPU per token")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--front", choices=("http", "grpc"), default="http")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    asyncio.run(serve(parser.parse_args()))
