"""The gRPC server of the Conductor + gateway process: limits, port, health, reflection."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from conductor.rpc_workers import WorkerControlService
from segue.errors import ConfigError
from segue.limits import GRPC_MESSAGE_BYTES_MAX

STOP_GRACE_S = 2.0
"""Streams get this long to see their last message."""

OPTIONS = (
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    # Otherwise a second process binds the same port and takes half of the connections.
    ("grpc.so_reuseport", 0),
    # Workers probe idle streams; the default of two pings in five minutes would cut them off.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class RpcServer:
    """Wraps grpc.aio.server, so that only this module meets it. `server` is for services to add themselves."""

    def __init__(self) -> None:
        self.server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()
        self._services: tuple[str, ...] = ()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    def add_worker_control(self, service: WorkerControlService) -> None:
        self.server.add_generic_rpc_handlers((service.handlers(),))

    def bind(self, host: str, port: int) -> int:
        """Returns the port (that was chosen, for 0). Raises ConfigError that names the option."""
        try:
            return int(self.server.add_insecure_port(f"{host}:{port}"))
        except RuntimeError as error:
            raise ConfigError(f"--grpc-port: cannot listen on {host}:{port}, is the port in use?") from error

    async def start(self, services: Sequence[str]) -> None:
        """Serve, and call `services` healthy."""
        self._services = ("", *services)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        await self.server.start()
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def announce_end(self) -> None:
        """Health says NOT_SERVING from now on: balancers look elsewhere."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self.server.stop(STOP_GRACE_S)
