"""Real P and D processes on the toy engine: entry contract, tokens, cancels, crashes, clean ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from front_rig import Front, WorkerProcess, toy_command, worker_config

from kvstore.events_zmq import EventSubscriber
from segue.kv_events import LoadReport
from segue.manifest import Role
from segue.sampling_params import SamplingParams
from segue.worker_messages import OutcomeKind
from worker_runtime.toy_engine import toy_tokens

SAMPLING = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
PROMPT = list(range(5, 42))


class Cluster:
    def __init__(self, front: Front, runtime_dir: Path) -> None:
        self.front = front
        self.runtime_dir = runtime_dir
        self.workers: dict[str, WorkerProcess] = {}

    async def start(self, role: Role, **changes: object) -> WorkerProcess:
        config = worker_config(self.front, role, self.runtime_dir, **changes)
        worker = self.workers[config.name] = WorkerProcess(config, toy_command(role))
        self.front.workers.pop(config.name, None)
        await worker.start()
        return worker

    def leftovers(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"seguetest-{self.runtime_dir.name}*"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    front = Front()
    await front.start()
    made = Cluster(front, tmp_path)
    yield made
    for worker in made.workers.values():
        await worker.stop()
    await made.front.close()


async def start_pair(cluster: Cluster) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        await cluster.start(role)
    for worker in cluster.workers.values():
        await worker.ready()


async def test_pair_generates_the_models_tokens(cluster: Cluster) -> None:
    await start_pair(cluster)
    front = cluster.front
    keys = [
        front.submit(f"r{number}", PROMPT[number:], SAMPLING, prefill="prefill-0", decode="decode-0")
        for number in range(8)
    ]
    await front.until(lambda: all(front.finish(key) for key in keys))
    for number, key in enumerate(keys):
        assert front.generated(key) == toy_tokens(PROMPT[number:], 12, seed=3)
        assert [delta.position for delta in front.deltas[key] if delta.from_prefill] == [len(PROMPT) - number]
    await front.until(lambda: all(OutcomeKind.FINISHED in front.kinds(key) for key in keys))
    assert OutcomeKind.HANDOFF_COMPLETE in front.kinds(keys[0])
    assert front.cards["toy"].name == "toy"


async def test_clean_end_leaves_no_shared_memory(cluster: Cluster) -> None:
    await start_pair(cluster)
    assert len(cluster.leftovers()) == 1
    assert [await worker.stop() for worker in cluster.workers.values()] == [0, 0]
    assert cluster.leftovers() == []


async def test_aggregated_instance_prefills_locally(cluster: Cluster) -> None:
    worker = await cluster.start(Role.AGGREGATED)
    await worker.ready()
    front = cluster.front
    key = front.submit("r", PROMPT, SAMPLING, prefill="", decode="aggregated-0")
    await front.until(lambda: front.finish(key))
    assert front.generated(key) == toy_tokens(PROMPT, 12, seed=3)


async def test_broken_token_stream_is_replayed_without_a_gap(cluster: Cluster) -> None:
    await start_pair(cluster)
    front = cluster.front
    front.cut_tokens_after = 4
    key = front.submit("r", PROMPT, SAMPLING, prefill="prefill-0", decode="decode-0")
    await front.until(lambda: front.finish(key))
    await front.until(lambda: len(front.generated(key)) == 12)
    assert front.generated(key) == toy_tokens(PROMPT, 12, seed=3)
    assert front.cut_tokens_after is None


async def test_cancel_mid_stream_ends_both_sides(cluster: Cluster) -> None:
    await start_pair(cluster)
    front = cluster.front
    long = msgspec.structs.replace(SAMPLING, max_tokens=100_000)
    key = front.submit("r", PROMPT, long, prefill="prefill-0", decode="decode-0")
    await front.until(lambda: len(front.deltas[key]) > 3)
    front.cancel("decode-0", key)
    await front.until(lambda: OutcomeKind.CANCELLED in front.kinds(key))
    again = front.submit("r", PROMPT, SAMPLING, prefill="prefill-0", decode="decode-0", attempt=2)
    await front.until(lambda: front.finish(again))
    assert front.generated(again) == toy_tokens(PROMPT, 12, seed=3)


async def test_killed_prefill_instance_is_noticed_by_d_at_once(cluster: Cluster) -> None:
    """D holds lent pages of a P that is killed before it computes anything: the pages come back without a lease."""
    await start_pair(cluster)
    front = cluster.front
    warm = front.submit("warm", PROMPT, SAMPLING, prefill="prefill-0", decode="decode-0")
    await front.until(lambda: front.finish(warm))
    cluster.workers["prefill-0"].kill()
    await front.workers["prefill-0"].gone.wait()
    key = front.submit("r", PROMPT[::-1], SAMPLING, prefill="prefill-0", decode="decode-0")
    await cluster.start(Role.PREFILL)
    await front.registered("prefill-0")
    again = front.submit("r", PROMPT[::-1], SAMPLING, prefill="prefill-0", decode="decode-0", attempt=2)
    await front.until(lambda: front.finish(again))
    assert front.generated(again) == toy_tokens(PROMPT[::-1], 12, seed=3)
    await front.until(lambda: OutcomeKind.FAILED in front.kinds(key))


async def test_pair_with_different_block_sizes_is_refused_with_the_reason(cluster: Cluster) -> None:
    await cluster.start(Role.DECODE)
    engine = msgspec.structs.replace(
        worker_config(cluster.front, Role.PREFILL, cluster.runtime_dir).engine, block_size=8
    )
    await cluster.start(Role.PREFILL, engine=engine)
    front = cluster.front
    await front.registered("prefill-0", "decode-0")
    key = front.submit("r", PROMPT, SAMPLING, prefill="prefill-0", decode="decode-0")
    await front.until(lambda: OutcomeKind.REFUSED in front.kinds(key))
    assert "block size differs" in next(o.reason for o in front.outcomes[key] if o.kind is OutcomeKind.REFUSED)


async def test_load_reports_and_kv_events_are_published(cluster: Cluster) -> None:
    await start_pair(cluster)
    front = cluster.front
    subscriber = EventSubscriber()
    subscriber.add(front.workers["decode-0"].manifest.events_address)
    message = await subscriber.receive()
    while not isinstance(message, LoadReport):
        message = await subscriber.receive()
    assert message.pages_total == 64
    key = front.submit("r", PROMPT, SAMPLING, prefill="prefill-0", decode="decode-0")
    while isinstance(message, LoadReport):
        message = await subscriber.receive()
    assert message.ref == front.workers["decode-0"].manifest.ref
    await front.until(lambda: front.finish(key))
    subscriber.close()


async def test_worker_registers_again_when_its_conductor_returns(cluster: Cluster) -> None:
    worker = await cluster.start(Role.AGGREGATED)
    await worker.ready()
    front = cluster.front
    await front.registered("aggregated-0")
    await front.close()
    cluster.front = returned = Front()
    await returned.start(front.address)
    await returned.registered("aggregated-0")
    key = returned.submit("r", PROMPT, SAMPLING, prefill="", decode="aggregated-0")
    await returned.until(lambda: returned.finish(key))


async def until_idle(front: Front, name: str) -> LoadReport:
    """The first load report of a worker that says no page is in use."""
    subscriber = EventSubscriber()
    subscriber.add(front.workers[name].manifest.events_address)
    async with asyncio.timeout(20):
        async for message in subscriber:
            idle = isinstance(message, LoadReport) and message.running + message.waiting == 0
            if idle and message.pages_active + message.pages_held + message.pages_quarantined == 0:
                break
    subscriber.close()
    return message


async def test_cancels_at_any_moment_leave_no_page_in_use(cluster: Cluster) -> None:
    await start_pair(cluster)
    front = cluster.front
    long = msgspec.structs.replace(SAMPLING, max_tokens=500)
    for number in range(60):
        prompt = [number, *PROMPT]
        key = front.submit(f"r{number}", prompt, long, prefill="prefill-0", decode="decode-0")
        await asyncio.sleep(number % 20 * 0.001)
        for name in ("decode-0", "prefill-0"):
            front.cancel(name, key)
    for name in ("decode-0", "prefill-0"):
        await until_idle(front, name)
