"""Composition root of the Conductor + gateway process: `python -m conductor.app`, with a FrontConfig as JSON on stdin.

Prints one line {"ready": {"grpc": "host:port", "http": "host:port"}} when both servers accept; SIGTERM or SIGINT end
it cleanly. Needs neither torch nor ray: models reach it as cards in the workers' registrations.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from conductor import rpc_pools
from conductor.control_loop import ControlLoop, monotonic_us
from conductor.core.machine import ConductorCore
from conductor.core.settings import CoreSettings, make_core
from conductor.core_settings import core_settings
from conductor.directory_link import DirectoryLink
from conductor.gateway.server import SERVICE_NAMES, Gateway, build_gateway
from conductor.http_server import HttpServer
from conductor.recording import Recorder
from conductor.registry import Registry
from conductor.rpc_pools import PoolControlService
from conductor.rpc_server import RpcServer
from conductor.rpc_workers import SERVICE_NAME, WorkerControlService
from kvstore.events_zmq import EventSubscriber
from segue.config import FrontConfig, decode_config
from segue.errors import ConfigError

log = logging.getLogger(__name__)

EXIT_CONFIG = 2

LINGER_S_MAX = 2.0
"""Who ends a whole cluster ends the workers as well: until they are gone, new requests are told so."""


class Endpoints(msgspec.Struct, frozen=True):
    """host:port of both servers, as clients reach them."""

    grpc: str
    http: str


async def run(
    config: FrontConfig,
    stop: asyncio.Event,
    on_ready: Callable[[Endpoints], None],
    *,
    make: Callable[[CoreSettings], ConductorCore] = make_core,
) -> None:
    """Serve until `stop` is set. Raises ConfigError before anything is served, or the fault that ended a part.

    `make` may give the core another policy than the default one."""
    async with AsyncExitStack() as stack:
        settings = core_settings(config)
        recorder = _recorder(config, settings, stack)
        name, secret = f"conductor-{secrets.token_hex(4)}", secrets.token_bytes(32)
        directory = DirectoryLink(config, name, monotonic_us, secret)
        stack.push_async_callback(directory.close)
        registry = Registry(config.model_names)
        subscriber = EventSubscriber()
        stack.callback(subscriber.close)
        loop = ControlLoop(make(settings), registry, subscriber, recorder=recorder)
        workers = WorkerControlService(loop, registry, name)
        gateway = build_gateway(
            config,
            loop,
            tenant_secret=secret,
            tenants=directory.tenants,
            peers=directory.peers,
            collectors=[directory.metrics()],
        )
        rpc, http = RpcServer(), HttpServer(gateway.http_app, config.log_level)
        endpoints = _bind(config, rpc, http)
        rpc.add_worker_control(workers)
        gateway.add_to(rpc.server)
        pools = PoolControlService(workers.ended)
        pools.add_to(rpc.server)
        gateway.add_scaling(rpc.server, pools)
        await gateway.start(endpoints.grpc)
        await rpc.start((*SERVICE_NAMES, SERVICE_NAME, rpc_pools.SERVICE_NAME))
        await directory.announce(endpoints.grpc, endpoints.http, gateway.share_tenant_secret)
        parts = [
            asyncio.create_task(loop.run(), name="control loop"),
            asyncio.create_task(loop.read_events(), name="event reader"),
            asyncio.create_task(workers.watch_heartbeats(), name="heartbeats"),
            asyncio.create_task(directory.run(), name="directory"),
            http.start(),
        ]
        on_ready(endpoints)
        try:
            await _until(stop, parts)
        finally:
            await _shut_down(rpc, http, gateway, workers)
            await _cancel(parts)
            await directory.withdraw()


async def _until(stop: asyncio.Event, parts: list[asyncio.Task[None]]) -> None:
    """Returns when `stop` is set; raises what ended a part before."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        stopped.cancel()


async def _shut_down(rpc: RpcServer, http: HttpServer, gateway: Gateway, workers: WorkerControlService) -> None:
    """Clients first, so that they see UNAVAILABLE instead of a cut connection; then the workers."""
    await rpc.announce_end()
    gateway.refuse()
    await workers.wait_empty(LINGER_S_MAX)
    await gateway.close()
    workers.close("the Conductor shuts down")
    await http.stop()
    await rpc.stop()


async def _cancel(parts: list[asyncio.Task[None]]) -> None:
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)


def _bind(config: FrontConfig, rpc: RpcServer, http: HttpServer) -> Endpoints:
    grpc_port = rpc.bind(config.host, config.grpc_port)
    http_port = http.bind(config.host, config.http_port)
    host = _reachable(config)
    return Endpoints(grpc=f"{host}:{grpc_port}", http=f"{host}:{http_port}")


def _reachable(config: FrontConfig) -> str:
    """Where others reach this process: a wildcard is no address to hand to workers."""
    if config.advertise_host:
        return config.advertise_host
    if config.host in ("0.0.0.0", "::", ""):
        return socket.gethostbyname(socket.gethostname())
    return config.host


def _recorder(config: FrontConfig, settings: CoreSettings, stack: AsyncExitStack) -> Recorder | None:
    if not config.record:
        return None
    try:
        recorder = Recorder(Path(config.record), settings)
    except OSError as error:
        raise ConfigError(f"--record: cannot write {config.record}: {error.strerror}") from error
    stack.callback(recorder.close)
    return recorder


async def _main(config: FrontConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(config, stop, _announce)


def _announce(endpoints: Endpoints) -> None:
    print(msgspec.json.encode({"ready": endpoints}).decode(), flush=True)


def main() -> int:
    try:
        config = decode_config(sys.stdin.buffer.readline(), FrontConfig, "stdin")
        logging.basicConfig(
            stream=sys.stderr, level=config.log_level.upper(), format="%(levelname)s %(name)s %(message)s"
        )
        asyncio.run(_main(config))
    except ConfigError as error:
        print(f"segue front: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
