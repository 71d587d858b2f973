"""uvicorn inside of somebody else's event loop: no signal handlers, a socket that is bound before it starts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from segue.errors import ConfigError

STOP_GRACE_S = 2
BACKLOG = 2048


class _EmbeddedServer(uvicorn.Server):
    """Signals belong to the composition root."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`bind`, `start`, `stop`, once each and in this order."""

    def __init__(self, app: FastAPI, log_level: str) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _EmbeddedServer(config)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Returns the port (that was chosen, for 0). Raises ConfigError that names the option."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise ConfigError(f"--http-port: cannot listen on {host}:{port}: {error.strerror}") from error
        listener.listen(BACKLOG)
        self._socket = listener
        return int(listener.getsockname()[1])

    def start(self) -> asyncio.Task[None]:
        """Serve until `stop`; the task ends early only by a fault."""
        assert self._socket is not None, "bind first"
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")
        return self._task

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        if self._socket is not None:
            self._socket.close()
