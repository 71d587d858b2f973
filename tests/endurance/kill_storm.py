"""Streams that go on and on while processes are killed; every token of every stream is checked."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import pairwise

import grpc
import msgspec
from toy_cluster import InferenceStub, Stream, ToyCluster, channel, follow, request_of

from worker_runtime.toy_engine import VOCAB_SIZE, toy_tokens

PROMPT_TOKENS = (1, 4, 17, 60, 150, 400)
TOKENS_MAX = (40, 120, 300)
READY_SECONDS_MAX = 60.0


class StormReport(msgspec.Struct):
    """`gaps_s`: the longest silence in each stream that was planned more than once. `faults` should stay empty."""

    streams: int = 0
    replanned: int = 0
    kills: int = 0
    attempts_most: int = 0
    gaps_s: list[float] = []
    faults: list[str] = []

    def gap_s(self, quantile: float) -> float:
        ranked = sorted(self.gaps_s)
        return ranked[min(int(quantile * len(ranked)), len(ranked) - 1)] if ranked else 0.0


async def storm(
    cluster: ToyCluster, *, streams: int, kills: int, seed: int, pause_s: tuple[float, float]
) -> StormReport:
    """`streams` clients, each starting its next request when one is done, under `kills` kills; all end well after."""
    report, calm, rng = StormReport(), asyncio.Event(), random.Random(seed)
    async with channel(cluster.grpc) as connection:
        stub = InferenceStub(connection)
        running = clients(stub, streams, rng, calm, report)
        await asyncio.sleep(0.5)
        for _ in range(kills):
            await _kill_one(cluster, rng)
            report.kills += 1
            await asyncio.sleep(rng.uniform(*pause_s))
        calm.set()
        await asyncio.gather(*running)
    return report


def clients(
    stub: object, streams: int, rng: random.Random, calm: asyncio.Event, report: StormReport
) -> list[asyncio.Task[None]]:
    """`streams` clients, each starting its next request when one is done, until it is calm."""
    seeds = [rng.getrandbits(64) for _ in range(streams)]
    return [asyncio.create_task(_client(stub, random.Random(seed), calm, report)) for seed in seeds]


async def _kill_one(cluster: ToyCluster, rng: random.Random) -> None:
    """Any process but the last decode instance: without one, new requests are refused, as documented."""
    victim = await until(lambda: _victim(cluster.pids(), rng))
    os.kill(victim, signal.SIGKILL)


def _victim(pids: dict[str, int], rng: random.Random) -> int | None:
    decodes = [name for name in pids if name.startswith("decode")]
    names = [name for name in pids if name not in decodes or len(decodes) > 1]
    return pids[rng.choice(names)] if names else None


async def until(what: Callable[[], int | None], seconds_max: float = READY_SECONDS_MAX) -> int:
    deadline = time.monotonic() + seconds_max
    while (found := what()) is None:
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)
    return found


async def _client(stub: object, rng: random.Random, calm: asyncio.Event, report: StormReport) -> None:
    while not calm.is_set():
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice(PROMPT_TOKENS))]
        tokens_max, seed = rng.choice(TOKENS_MAX), rng.choice((0, rng.randrange(1 << 32)))
        stream = Stream()
        report.streams += 1
        try:
            await follow(stub, request_of(prompt, tokens_max, seed), stream)
        except grpc.aio.AioRpcError as error:
            report.faults.append(f"after {len(stream.tokens)} tokens: {error.code().name} {error.details()}")
        if stream.finished is not None:
            _judge(stream, toy_tokens(prompt, tokens_max, seed), report)


def _judge(stream: Stream, expected: list[int], report: StormReport) -> None:
    if stream.tokens != expected:
        pairs = enumerate(zip(stream.tokens, expected, strict=False))
        wrong = next((at for at, (got, right) in pairs if got != right), -1)
        report.faults.append(f"{len(stream.tokens)} of {len(expected)} tokens, the first wrong one at {wrong}")
    assert stream.finished is not None
    report.attempts_most = max(report.attempts_most, stream.finished.attempts)
    if stream.finished.attempts > 1:
        report.replanned += 1
        report.gaps_s.append(max((after - before for before, after in pairwise(stream.at_s)), default=0.0))
