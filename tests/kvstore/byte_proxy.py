"""A TCP relay that treats the bytes of page connections badly, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass


@dataclass
class Faults:
    """Counted over the bytes from source to target, of all connections together. None: not at all."""

    cut_at: int | None = None
    """Break the connection that carries this byte; once."""
    corrupt_at: int | None = None
    """Flip a bit of this byte; once."""
    swallow_at: int | None = None
    """From this byte on accept everything, pass nothing on, either way: a half-open connection."""
    delay_s: float = 0.0
    """Before each piece is passed on."""
    piece_bytes: int = 16384
    """Passed on in pieces of at most so many bytes, either way."""


class ByteProxy:
    """`location` is to be dialled instead of `target`. Change `faults` at any time."""

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")
        self.faults = Faults()
        self.bytes_seen = 0
        self.connections = 0
        self.location = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="byte-proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def lead_to(self, target: str) -> None:
        """Connections made from now on reach another listener."""
        self._target = target.rpartition(":")

    def cut(self) -> None:
        """Break every connection now; what was swallowed before stays lost."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.location = f"{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(3):  # aborted transports close their sockets in a later turn
            await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._target[0], int(self._target[2]))
        except OSError:
            writer.transport.abort()
            return
        both = [
            asyncio.create_task(self._relay(reader, there_writer, forward=True)),
            asyncio.create_task(self._relay(there_reader, writer, forward=False)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in both:
                end.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for side in (writer, there_writer):
                side.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, forward: bool) -> None:
        while data := await reader.read(self.faults.piece_bytes):
            if self.faults.delay_s:
                await asyncio.sleep(self.faults.delay_s)
            passed = self._spoil(bytearray(data)) if forward else self._answer(data)
            if passed is None:
                return
            writer.write(passed)
            await writer.drain()

    def _answer(self, data: bytes) -> bytes:
        swallow = self.faults.swallow_at
        return b"" if swallow is not None and self.bytes_seen >= swallow else data

    def _spoil(self, data: bytearray) -> bytes | None:
        """What is passed on of it; None breaks the connection."""
        faults, first = self.faults, self.bytes_seen
        self.bytes_seen += len(data)
        if faults.cut_at is not None and self.bytes_seen > faults.cut_at:
            faults.cut_at = None
            return None
        if faults.corrupt_at is not None and first <= faults.corrupt_at < self.bytes_seen:
            data[faults.corrupt_at - first] ^= 0x10
            faults.corrupt_at = None
        if faults.swallow_at is not None and self.bytes_seen > faults.swallow_at:
            del data[max(0, faults.swallow_at - first) :]
        return bytes(data)
