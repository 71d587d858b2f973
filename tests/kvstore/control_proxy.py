"""Between P and D on the control channel: loses, repeats, delays and reorders messages, redirects page connections, and
leads to another D when told.

P dials the proxy, which dials D with P's own routing id: neither notices.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from segue.handoff_messages import Hello, SegmentDescriptor, decode_message, encode_message

Offers = Callable[[list[SegmentDescriptor]], list[SegmentDescriptor]]


class ControlProxy:
    """Chances are of each message, either way; Hello is left alone but for its offers. `rng` makes a run repeatable."""

    def __init__(self, target: str, path: str, rng: random.Random, offers: Offers) -> None:
        self.address = f"ipc://{path}"
        self.lose = self.repeat = 0.0
        self.delay_s_max = 0.0
        """Each message waits for a random time up to this: that reorders them."""
        self.is_remote = False
        """D seems to run on another machine: nobody here can see its process end."""
        self._rng = rng
        self._offers = offers
        self._target = target
        self._context = zmq.asyncio.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(self.address)
        self._backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._from_sources())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def lead_to(self, target: str) -> None:
        """From now on another instance answers at the address of this proxy."""
        for back in self._backs.values():
            back.disconnect(self._target)
            back.connect(target)
        self._target = target

    async def _from_sources(self) -> None:
        while True:
            source, raw = await self._front.recv_multipart()
            back = self._backs.get(source)
            if back is None:
                back = self._backs[source] = self._context.socket(zmq.DEALER)
                back.setsockopt(zmq.ROUTING_ID, source)
                back.connect(self._target)
                self._spawn(self._from_target(source, back))
            self._pass_on(raw, back.send)

    async def _from_target(self, source: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            raw = await back.recv()
            message = decode_message(raw)
            if isinstance(message, Hello):
                raw = encode_message(self._altered(message))
            self._pass_on(raw, lambda raw: self._front.send_multipart([source, raw]))

    def _altered(self, hello: Hello) -> Hello:
        offers = self._offers(hello.offers)
        pid_space = "another machine" if self.is_remote else hello.process.pid_space
        process = msgspec.structs.replace(hello.process, pid_space=pid_space)
        return msgspec.structs.replace(hello, offers=offers, process=process)

    def _pass_on(self, raw: bytes, send: Callable[[bytes], asyncio.Future[None]]) -> None:
        spared = isinstance(decode_message(raw), Hello)
        copies = 1 if spared else (self._rng.random() >= self.lose) + (self._rng.random() < self.repeat)
        for _ in range(copies):
            self._spawn(self._later(0.0 if spared else self._rng.random() * self.delay_s_max, raw, send))

    async def _later(self, delay_s: float, raw: bytes, send: Callable[[bytes], asyncio.Future[None]]) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        await send(raw)

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
