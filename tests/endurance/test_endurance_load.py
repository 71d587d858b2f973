"""Many streams at once, and many that are broken off: right tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import psutil
import pytest
from endurance_rows import record
from segue_proto.v1 import inference_pb2
from toy_cluster import InferenceStub, Stream, ToyCluster, booked, channel, follow, idle_within, request_of

from worker_runtime.toy_engine import VOCAB_SIZE, toy_tokens

STREAMS = 200
LENGTHS = ((1, 60), (7, 20), (30, 90), (90, 40), (250, 10), (600, 25))
"""(prompt tokens, generated tokens)."""

IDLE_S_MAX = 1.0
"""Load reports come at least every second; what is free is free within a step."""

CANCEL_KINDS = ("client gone", "Cancel", "deadline")


async def one_round(stub: Any, rng: random.Random) -> list[str]:
    """What was wrong with 200 concurrent streams of mixed length."""

    async def one(index: int) -> str:
        prompt_tokens, tokens_max = LENGTHS[index % len(LENGTHS)]
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
        stream = await follow(stub, request_of(prompt, tokens_max, seed=index), Stream())
        return "" if stream.tokens == toy_tokens(prompt, tokens_max, seed=index) else f"stream {index} has wrong tokens"

    return [fault for fault in await asyncio.gather(*map(one, range(STREAMS))) if fault]


def rss_bytes(cluster: ToyCluster) -> int:
    return sum(
        psutil.Process(pid).memory_info().rss for pid in [*cluster.pids().values(), *cluster.fronts.pids().values()]
    )


@pytest.mark.parametrize(("rounds", "growth_max"), [(2, 0.04), pytest.param(8, 0.02, marks=pytest.mark.slow)])
async def test_two_hundred_streams_leave_nothing_and_a_further_round_needs_no_more_memory(
    cluster: ToyCluster, rounds: int, growth_max: float
) -> None:
    """The first rounds fill caches and replay buffers of fixed size, which weigh much beside instances without a model:
    a short run cannot tell them from a small leak."""
    rng = random.Random(1)
    async with channel(cluster.grpc) as connection:
        stub, rss = InferenceStub(connection), []
        for _ in range(rounds):
            start = time.monotonic()
            assert await one_round(stub, rng) == []
            seconds = time.monotonic() - start
            idle_s = await idle_within(stub, IDLE_S_MAX)
            assert idle_s is not None, "pages are still in use"
            assert booked(cluster.http) == 0
            rss.append(rss_bytes(cluster))
    growth = rss[-1] / rss[-2] - 1
    record(f"200 streams, round {rounds}", "duration", seconds, "s")
    record(f"200 streams, round {rounds}", "RSS growth over the round before", growth * 100, "%")
    assert growth < growth_max


async def broken_off(stub: Any, index: int, kind: str, rng: random.Random) -> Stream:
    """One request that ends at a random moment: queued, in prefill, on its way over, or decoding."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 5, 30, 100, 400)))]
    delay_s = rng.random() * rng.choice((0.01, 0.05, 0.2, 0.5))
    stream, request = Stream(), request_of(prompt, 1500, seed=index, request_id=f"broken-off-{index}")
    client = asyncio.create_task(follow(stub, request, stream, delay_s + 0.005 if kind == "deadline" else 60))
    if kind != "deadline":
        await asyncio.sleep(delay_s)
        cancel = inference_pb2.CancelRequest(request_id=request.request_id)
        if kind == "client gone" or not (await stub.Cancel(cancel)).found:
            client.cancel()
    try:
        await client
    except asyncio.CancelledError:
        pass
    except grpc.aio.AioRpcError as error:
        assert error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED), error.details()
    assert stream.finished is None, "it was not broken off"
    assert stream.tokens == toy_tokens(prompt, len(stream.tokens), seed=index)
    return stream


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
async def test_cancels_at_random_moments_give_all_pages_back(cluster: ToyCluster, count: int) -> None:
    rng, idle_s = random.Random(count), []
    async with channel(cluster.grpc) as connection:
        stub = InferenceStub(connection)
        for first in range(0, count, 3):
            kinds = rng.sample(CANCEL_KINDS, 3)
            await asyncio.gather(*(broken_off(stub, first + at, kind, rng) for at, kind in enumerate(kinds)))
            idle_s.append(await idle_within(stub, IDLE_S_MAX))
            assert idle_s[-1] is not None, f"pages are in use after cancels {first} to {first + 2}"
        await asyncio.sleep(IDLE_S_MAX)
        assert await idle_within(stub, 0.0) is not None, "pages are in use after all"
        assert booked(cluster.http) == 0
    record(f"{count} cancels", "slowest return of pages", max(filter(None, idle_s), default=0.0), "s")
