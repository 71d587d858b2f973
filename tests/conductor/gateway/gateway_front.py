"""A real gRPC server and a real HTTP server in front of a FakeConductor, on ports of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import uvicorn

from conductor.gateway.server import Gateway, build_gateway
from conductor.gateway.testing import FakeConductor, Script, byte_level_tokenizer
from conductor.ports import RoutedRequest
from segue import limits
from segue.config import FrontConfig


@dataclass
class Front:
    conductor: FakeConductor
    gateway: Gateway
    grpc_address: str
    http_url: str

    async def idle(self) -> None:
        """Returns when no request is live any more."""
        while len(self.gateway.table):
            await asyncio.sleep(0.005)


def tokens_of(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def saying(text: str, **script: object) -> Callable[[RoutedRequest], Script]:
    """Every request is answered with `text` and then the end token."""
    tokenizer = byte_level_tokenizer()
    tokens = [*tokenizer.encode(text).ids, tokenizer.token_to_id("<|im_end|>")]
    return lambda request: Script(tokens=tokens, **script)


def client_id(request: RoutedRequest) -> str:
    """The client's part of a wire id."""
    return request.request_id.rpartition("~")[0]


@asynccontextmanager
async def serving(conductor: FakeConductor, config: FrontConfig, **parts: Any) -> AsyncIterator[Front]:
    """`parts` are more arguments of `build_gateway`."""
    gateway = build_gateway(config, conductor, tenant_secret=b"secret", **parts)
    conductor.deliver = gateway.table.on_tokens
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", limits.GRPC_MESSAGE_BYTES_MAX)])
    gateway.add_to(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await gateway.start(address)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(gateway.http_app, log_level="warning", lifespan="off"))
        serve = asyncio.create_task(http.serve([listener]))
        while not http.started:
            await asyncio.sleep(0.005)
        try:
            yield Front(conductor, gateway, address, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            await gateway.close()
            http.should_exit = True
            await serve
            await server.stop(0)
