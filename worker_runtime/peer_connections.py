"""Meeting a peer: check that the pair fits, that its pages can be written, and watch its process.

The source dials and says Hello until it is answered; the target answers with ways to write its pages, or with a
refusal. Both sides check the manifests themselves: neither trusts the Conductor to have paired well. Of a peer of
another wire version no more is read than that: both tell the other why. An address may lead to somebody else than it
did: who answers compares whom it was asked for with itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.connectors.base import Mover, MoverError
from kvstore.connectors.control_zmq import ControlChannel, UnreachableAddress
from kvstore.connectors.process_identity import ProcessWatch, this_process
from segue.handoff_messages import ForeignHello, HeardMessage, Hello
from segue.ids import InstanceRef, absence
from segue.manifest import InstanceManifest, pairing_refusal
from segue.wire_version import wire_refusal
from segue.worker_messages import Peer
from worker_runtime.events import Event, LinkReady, LinkRefused, LinkRestored, PeerGone, PeerMessage

HELLO_REPEAT_S = 0.25
HELLO_TIMEOUT_S = 10.0
"""A decode instance answers in microseconds; it may be busy mapping memory for its first seconds."""


class PeerConnections:
    """Belongs to the I/O loop. `post` takes events for the core."""

    def __init__(self, ref: InstanceRef, mover: Mover, post: Callable[[Event], None]) -> None:
        self._ref = ref
        self._mover = mover
        self._post = post
        self._process = this_process()
        self.channel = ControlChannel(ref, self.on_message, lambda peer: post(LinkRestored(peer)))
        self.manifest: InstanceManifest | None = None
        """Set once the control address is known, before anything is dialled or answered."""
        self._dialling: dict[InstanceRef, asyncio.Task[None]] = {}
        self._addresses: dict[InstanceRef, str] = {}
        """Of those that were dialled."""
        self._answers: dict[InstanceRef, asyncio.Future[Hello | ForeignHello]] = {}
        self._watches: dict[InstanceRef, ProcessWatch] = {}

    def open(self, peer: Peer) -> None:
        """Ends with LinkReady or LinkRefused."""
        if peer.ref not in self._dialling:
            self._part_with_predecessors(peer)
            self._addresses[peer.ref] = peer.control_address
            self._dialling[peer.ref] = asyncio.create_task(self._dial(peer))

    def on_message(self, message: HeardMessage) -> None:
        if not isinstance(message, Hello | ForeignHello):
            self._post(PeerMessage(message))
        elif isinstance(message, Hello) and message.is_answer:
            self._take_answer(message.asked, message)
        elif message.source in self._answers:
            self._take_answer(message.source, message)
        elif message.source not in self._dialling:
            self._answer(message)

    def close(self) -> None:
        for task in self._dialling.values():
            task.cancel()
        for peer in list(self._watches):
            self._unwatch(peer)
        self.channel.close()

    # -- the source's side

    def _take_answer(self, asked: InstanceRef, message: Hello | ForeignHello) -> None:
        """One that was not waited for any more means nothing."""
        answer = self._answers.get(asked)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _dial(self, peer: Peer) -> None:
        refusal = await self._meet(peer)
        del self._dialling[peer.ref]
        if refusal is None:
            self._post(LinkReady(peer.ref))
        else:
            self.channel.hang_up(peer.ref)
            self._post(LinkRefused(peer.ref, refusal))

    async def _meet(self, peer: Peer) -> str | None:
        """Why the pair cannot be used, or None when it can."""
        assert self.manifest is not None
        try:
            self.channel.dial(peer.ref, peer.control_address)
            answer = await self._hello(peer.ref)
        except UnreachableAddress as error:
            return f"{peer.name}: {error}"
        except TimeoutError:
            return f"{peer.name} does not answer at {peer.control_address}"
        if isinstance(answer, ForeignHello):
            return wire_refusal(self.manifest, answer.manifest)
        if answer.source != peer.ref:
            return absence(peer.ref, answer.source)
        refusal = answer.refusal or pairing_refusal(self.manifest, answer.manifest)
        if refusal:
            return refusal
        try:
            await asyncio.to_thread(self._mover.register, peer.ref, answer.process, answer.offers)
        except MoverError as error:
            return f"no way to write pages of {peer.name}: {error}"
        self._watch(peer.ref, answer)
        return None

    async def _hello(self, peer: InstanceRef) -> Hello | ForeignHello:
        assert self.manifest is not None
        answer: asyncio.Future[Hello | ForeignHello] = asyncio.get_running_loop().create_future()
        self._answers[peer] = answer
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                while not answer.done():
                    self.channel.send(Hello(self._ref, self.manifest, self._process, peer), peer)
                    await asyncio.wait([answer], timeout=HELLO_REPEAT_S)
            return answer.result()
        finally:
            del self._answers[peer]

    # -- the target's side

    def _answer(self, hello: Hello | ForeignHello) -> None:
        """Answer every Hello, also a repeated one; register the source at the first."""
        if self.manifest is None:
            return
        if isinstance(hello, ForeignHello):
            self._say_answer(hello.source, self._ref, wire_refusal(hello.manifest, self.manifest))
            return
        if hello.asked != self._ref:
            self._say_answer(hello.source, hello.asked, absence(hello.asked, self._ref))
            return
        refusal = pairing_refusal(hello.manifest, self.manifest)
        if not refusal and hello.source not in self._watches:
            try:
                self._mover.register(hello.source, hello.process, [])
            except MoverError as error:
                refusal = str(error)
            else:
                self._watch(hello.source, hello)
                self._post(LinkReady(hello.source))
        self._say_answer(hello.source, self._ref, refusal)

    def _say_answer(self, to: InstanceRef, asked: InstanceRef, refusal: str | None) -> None:
        assert self.manifest is not None
        offers = [] if refusal else self._mover.describe()
        answer = Hello(self._ref, self.manifest, self._process, asked, True, offers, refusal or "")
        self.channel.send(answer, to)

    # -- the end of a peer's process

    def _part_with_predecessors(self, target: Peer) -> None:
        """Nothing more goes to an earlier incarnation, nor to who was at this address before: on another machine they
        cannot be seen to end, and two connections of ours to one address would take each other's place there."""
        for peer, address in list(self._addresses.items()):
            is_earlier = peer.uuid == target.ref.uuid and peer.incarnation < target.ref.incarnation
            if is_earlier or (address == target.control_address and peer != target.ref):
                self._on_gone(peer)

    def _watch(self, peer: InstanceRef, hello: Hello) -> None:
        self._unwatch(peer)
        watch = self._watches[peer] = ProcessWatch(hello.process)
        descriptor = watch.fileno()
        if descriptor is not None:
            asyncio.get_running_loop().add_reader(descriptor, self._on_gone, peer)
        elif watch.is_gone():
            self._on_gone(peer)

    def _on_gone(self, peer: InstanceRef) -> None:
        self._unwatch(peer)
        self._addresses.pop(peer, None)
        self.channel.hang_up(peer)
        self._mover.forget(peer)
        self._post(PeerGone(peer))

    def _unwatch(self, peer: InstanceRef) -> None:
        watch = self._watches.pop(peer, None)
        if watch is None:
            return
        descriptor = watch.fileno()
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
        watch.close()
