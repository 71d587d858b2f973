"""One thread that waits for sockets, for a mover whose bytes must not hold up the loop that decides.

Callbacks run in the thread and never block. `call` hands over work from any other thread.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable

TICK_S = 0.25
"""How often `on_tick` looks for what has made no progress."""

OnReady = Callable[[int], None]


class SocketLoop:
    def __init__(self, name: str, on_tick: Callable[[float], None]) -> None:
        self._on_tick = on_tick
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._ending = False
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Callable[[], object]) -> None:
        """In order of calling; dropped once the loop has ended."""
        with self._closing:
            if not self._closed:
                self._calls.put(work)
                os.eventfd_write(self._wake, 1)

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` in the thread, after what was called before, and wait for its end. Idempotent."""
        if self._thread.is_alive():
            self.call(last)
            self.call(self._end)
            self._thread.join()
            with self._closing:
                self._closed = True
                os.close(self._wake)

    # -- in the thread

    def watch(self, sock: socket.socket, events: int, on_ready: OnReady) -> None:
        """Start to watch, or change what is watched for."""
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, on_ready)
        else:
            self._selector.register(sock, events, on_ready)

    def unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)

    def _run(self) -> None:
        tick_s = time.monotonic() + TICK_S
        while not self._ending:
            for key, mask in self._selector.select(max(0.0, tick_s - time.monotonic())):
                if key.data is not None and key.fd in self._selector.get_map():
                    key.data(mask)
            self._run_calls()
            if (now_s := time.monotonic()) >= tick_s:
                self._on_tick(now_s)
                tick_s = now_s + TICK_S
        self._selector.close()

    def _run_calls(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while not self._calls.empty():
            self._calls.get()()

    def _end(self) -> None:
        self._ending = True
