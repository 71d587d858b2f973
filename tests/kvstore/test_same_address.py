"""Two instances at one TCP address, one after the other, as seen from another machine, which sees no process end.

In the middle of a transfer the address leads to an instance that knows nothing of it: one started again in the same
slot, or another one. It refuses with the reason, P gives up at once, and no token is made from pages of two instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from front_rig import Front, Registered, WorkerProcess, toy_command
from test_faulty_network import PROMPT, FaultyPair

from kvstore.connectors.control_zmq import ControlChannel
from kvstore.connectors.process_identity import this_process
from segue.handoff_messages import HeardMessage, Hello
from segue.ids import AttemptRef, InstanceRef, absence
from segue.manifest import Role
from segue.worker_messages import OutcomeKind
from worker_runtime.toy_engine import toy_tokens


class SharedAddress(FaultyPair):
    """Control messages and pages of D go to `control` and `bytes`, wherever these lead."""

    lease_ms = 600_000
    """Nothing ends because somebody was silent."""

    async def start(self, role: Role) -> None:
        await super().start(role)
        if self.control is not None:
            self.control.is_remote = True

    async def start_successor(self, uuid: str) -> Registered:
        """Another D, with nothing in it. It takes the name of the first, which stays in the test's hands."""
        config = msgspec.structs.replace(self.workers["decode-0"].config, uuid=uuid)
        worker = self.workers["successor"] = WorkerProcess(config, toy_command(Role.DECODE))
        del self.front.workers["decode-0"]
        await worker.start()
        await worker.ready()
        await self.front.registered("decode-0")
        return self.front.workers["decode-0"]

    async def stall_in_the_middle_of_a_transfer(self, decode: Registered) -> AttemptRef:
        """Some of the pages are there, and no further byte comes through."""
        assert self.bytes is not None
        named, self.front.workers["decode-0"] = self.front.workers["decode-0"], decode
        stalled_at = self.faults.swallow_at = self.bytes.bytes_seen + 700
        key = self.submit(1)
        self.front.workers["decode-0"] = named
        async with asyncio.timeout(30):
            while self.bytes.bytes_seen <= stalled_at or not self.front.generated(key):
                await asyncio.sleep(0.01)
        return key

    def hand_address_to(self, successor: Registered, pages: str) -> None:
        """The first D is killed; its address leads to the successor, which is planned with just this address."""
        assert self.control is not None and self.bytes is not None
        self.workers["decode-0"].kill()
        self.killed, self.workers["decode-0"] = self.workers["decode-0"], self.workers.pop("successor")
        self.control.lead_to(successor.manifest.control_address)
        self.bytes.lead_to(pages)
        self.faults.swallow_at = None
        self.bytes.cut()
        successor.manifest = msgspec.structs.replace(successor.manifest, control_address=self.control.address)

    async def close(self) -> None:
        await super().close()
        await self.killed.stop()


async def page_listener_of(asker: Registered, target: Registered) -> str:
    """Where it takes pages over TCP, as it says to who says Hello."""
    answered: asyncio.Queue[HeardMessage] = asyncio.Queue()
    me = InstanceRef("asker", 1)
    channel = ControlChannel(me, answered.put_nowait)
    channel.dial(target.manifest.ref, target.manifest.control_address)
    channel.send(Hello(me, asker.manifest, this_process(), target.manifest.ref), target.manifest.ref)
    hello = await asyncio.wait_for(answered.get(), 30)
    channel.close()
    assert isinstance(hello, Hello)
    return next(offer.location for offer in hello.offers if offer.mover == "tcp")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[SharedAddress]:
    front = Front()
    await front.start()
    made = SharedAddress(front, tmp_path)
    for role in (Role.DECODE, Role.PREFILL):
        await made.start(role)
    assert await made.finish(0) == 1
    yield made
    await made.close()
    await front.close()


@pytest.mark.parametrize("uuid", ["uuid-decode", "uuid-another"])
async def test_transfer_to_an_address_that_another_instance_took_over_is_refused(
    pair: SharedAddress, uuid: str
) -> None:
    front, first = pair.front, pair.front.workers["decode-0"]
    successor = await pair.start_successor(uuid)
    pages = await page_listener_of(front.workers["prefill-0"], successor)
    key = await pair.stall_in_the_middle_of_a_transfer(first)
    pair.hand_address_to(successor, pages)
    await front.until(lambda: OutcomeKind.FAILED in front.kinds(key))
    reason = next(outcome.reason for outcome in front.outcomes[key] if outcome.kind is OutcomeKind.FAILED)
    assert reason == absence(first.manifest.ref, successor.manifest.ref)
    assert OutcomeKind.HANDOFF_COMPLETE not in front.kinds(key)
    assert front.generated(key) == toy_tokens([1, *PROMPT], 1, seed=3), "the first token, which P has sampled"
    assert await pair.finish(1, first_attempt=2) == 2
    await pair.until_idle()
