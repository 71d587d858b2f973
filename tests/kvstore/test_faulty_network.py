"""Real P and D processes on the toy engine, with a bad network between them: same tokens or a clean end, no leak.

The toy engine's tokens are right only if every page held the right K/V, so a page that was lost, torn or written by the
wrong attempt shows in the text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from byte_proxy import ByteProxy, Faults
from control_proxy import ControlProxy
from front_rig import Front, WorkerProcess, toy_command, worker_config

from kvstore.events_zmq import EventSubscriber
from segue.handoff_messages import SegmentDescriptor
from segue.ids import AttemptRef
from segue.kv_events import LoadReport
from segue.manifest import Role
from segue.sampling_params import SamplingParams
from segue.worker_messages import OutcomeKind
from worker_runtime.toy_engine import toy_tokens

SAMPLING = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
BLOCK = 16
PROMPT = list(range(3, 203))
"""13 pages of 128 bytes; in chunks of 64 tokens that is four moves."""


class FaultyPair:
    """P and D over TCP, every byte and every control message through a proxy."""

    lease_ms = 5_000

    def __init__(self, front: Front, runtime_dir: Path) -> None:
        self.front = front
        self.runtime_dir = runtime_dir
        self.workers: dict[str, WorkerProcess] = {}
        self.bytes: ByteProxy | None = None
        self.control: ControlProxy | None = None

    @property
    def faults(self) -> Faults:
        assert self.bytes is not None
        return self.bytes.faults

    async def start(self, role: Role) -> None:
        config = worker_config(self.front, role, self.runtime_dir)
        config = msgspec.structs.replace(
            config,
            engine=msgspec.structs.replace(config.engine, block_size=BLOCK),
            scheduler=msgspec.structs.replace(
                config.scheduler,
                kv_connector="tcp",
                max_num_batched_tokens=64,
                prefix_caching=False,
                handoff_lease_ms=self.lease_ms,
            ),
        )
        worker = self.workers[config.name] = WorkerProcess(config, toy_command(role))
        self.front.workers.pop(config.name, None)
        await worker.start()
        await worker.ready()
        if role is Role.DECODE:
            await self._interpose(config.name)

    async def _interpose(self, name: str) -> None:
        """The Conductor's word of where D listens is what P dials."""
        registered = self.front.workers[name]
        address = registered.manifest.control_address
        path = self.runtime_dir / f"proxy-{len(self.workers)}-{registered.manifest.ref.incarnation % 1000}"
        self.control = ControlProxy(address, str(path), random.Random(5), self._redirect)
        registered.manifest = msgspec.structs.replace(registered.manifest, control_address=self.control.address)

    def _redirect(self, offers: list[SegmentDescriptor]) -> list[SegmentDescriptor]:
        """Page connections go through the byte proxy. A refusal comes without an offer."""
        if not offers:
            return []
        (offer,) = [offer for offer in offers if offer.mover == "tcp"]
        if self.bytes is None:
            self.bytes = ByteProxy(offer.location)
        return [msgspec.structs.replace(offer, location=self.bytes.location)]

    def submit(self, number: int, attempt: int = 1) -> AttemptRef:
        prompt = [number, *PROMPT]
        return self.front.submit(
            f"r{number}", prompt, SAMPLING, prefill="prefill-0", decode="decode-0", attempt=attempt
        )

    async def until_ended(self, keys: list[AttemptRef]) -> None:
        over = {OutcomeKind.FINISHED, OutcomeKind.FAILED, OutcomeKind.REFUSED}
        await self.front.until(lambda: all(over & set(self.front.kinds(key)) for key in keys))

    async def finish(self, number: int, first_attempt: int = 1) -> int:
        """Run a request as the Conductor would, planning again what failed; the attempt that finished it."""
        for attempt in range(first_attempt, 6):
            key = self.submit(number, attempt)
            await self.until_ended([key])
            if OutcomeKind.FINISHED in self.front.kinds(key):
                await self.front.until(lambda key=key: self.front.finish(key))
                assert self.front.generated(key) == toy_tokens([number, *PROMPT], 8, seed=3)
                return attempt
        raise AssertionError(f"r{number} failed five times")

    async def until_idle(self) -> None:
        for name in self.workers:
            await until_no_page_is_used(self.front, name)

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.stop()
        if self.control is not None:
            await self.control.close()
        if self.bytes is not None:
            await asyncio.to_thread(self.bytes.close)


async def until_no_page_is_used(front: Front, name: str) -> None:
    subscriber = EventSubscriber()
    subscriber.add(front.workers[name].manifest.events_address)
    async with asyncio.timeout(40):
        async for message in subscriber:
            if not isinstance(message, LoadReport) or message.running + message.waiting:
                continue
            if message.pages_active + message.pages_held + message.pages_quarantined == 0:
                break
    subscriber.close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[FaultyPair]:
    front = Front()
    await front.start()
    made = FaultyPair(front, tmp_path)
    for role in (Role.DECODE, Role.PREFILL):
        await made.start(role)
    assert await made.finish(0) == 1
    yield made
    await made.close()
    await front.close()


def handed_over(pair: FaultyPair, number: int, attempt: int = 1) -> bool:
    return OutcomeKind.HANDOFF_COMPLETE in pair.front.kinds(AttemptRef(f"r{number}", attempt))


async def test_pages_come_over_tcp(pair: FaultyPair) -> None:
    assert handed_over(pair, 0)
    assert pair.bytes is not None and pair.bytes.bytes_seen > len(PROMPT) * 8
    await pair.until_idle()


@pytest.mark.parametrize("after", [500, 1500])
async def test_connection_that_breaks_is_made_up_for(pair: FaultyPair, after: int) -> None:
    assert pair.bytes is not None
    pair.faults.cut_at = pair.bytes.bytes_seen + after
    assert await pair.finish(1) == 1
    assert pair.faults.cut_at is None
    assert await pair.finish(2) == 1
    assert pair.bytes.connections >= 2
    await pair.until_idle()


@pytest.mark.parametrize("after", [9, 1000])
async def test_corrupt_byte_changes_no_token(pair: FaultyPair, after: int) -> None:
    assert pair.bytes is not None
    pair.faults.corrupt_at = pair.bytes.bytes_seen + after
    assert await pair.finish(1) == 1
    assert pair.faults.corrupt_at is None
    await pair.until_idle()


async def test_slow_network_changes_no_token(pair: FaultyPair) -> None:
    pair.faults.delay_s = 0.1
    assert await pair.finish(1) == 1
    await pair.until_idle()


async def test_half_open_connection_is_given_up(pair: FaultyPair) -> None:
    assert pair.bytes is not None
    pair.faults.swallow_at = pair.bytes.bytes_seen + 700
    key = pair.submit(1)
    await pair.until_ended([key])
    pair.faults.swallow_at = None
    await pair.finish(2)
    await pair.until_idle()


async def test_messages_lost_repeated_and_reordered_change_no_token(pair: FaultyPair) -> None:
    assert pair.control is not None
    pair.control.lose, pair.control.repeat, pair.control.delay_s_max = 0.1, 0.3, 0.05
    await asyncio.gather(*(pair.finish(number) for number in range(1, 9)))
    pair.control.lose = 0.0
    await pair.until_idle()


async def test_cancels_on_a_slow_network_leave_no_page_in_use(pair: FaultyPair) -> None:
    pair.faults.delay_s = 0.01
    for number in range(1, 25):
        key = pair.submit(number)
        await asyncio.sleep(number % 8 * 0.01)
        for name in ("decode-0", "prefill-0"):
            pair.front.cancel(name, key)
    await pair.until_idle()
    pair.faults.delay_s = 0.0
    assert await pair.finish(99) == 1
    await pair.until_idle()
