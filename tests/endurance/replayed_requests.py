"""Requests whose answers are known because they were asked before, in peace: what a disturbed run must repeat."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import grpc
import msgspec
from kill_storm import StormReport
from segue_proto.v1 import inference_pb2
from toy_cluster import Stream, follow

PROMPT_TOKENS = (1, 15, 40, 130, 260)
TOKENS_MAX = (40, 100, 200)


class Known(msgspec.Struct, frozen=True):
    request: inference_pb2.GenerateRequest
    tokens: list[int]


def asked(index: int, vocabulary: int) -> inference_pb2.GenerateRequest:
    """Even ones greedy, odd ones sampled with a seed."""
    rng = random.Random(index)
    request = inference_pb2.GenerateRequest()
    request.tokens.ids.extend(rng.randrange(vocabulary) for _ in range(rng.choice(PROMPT_TOKENS)))
    sampling = request.sampling
    sampling.max_tokens, sampling.ignore_eos = rng.choice(TOKENS_MAX), True
    sampling.temperature, sampling.seed = (0.0, 0) if index % 2 == 0 else (1.0, index)
    return request


async def learn(stub: Any, count: int, vocabulary: int) -> list[Known]:
    requests = [asked(index, vocabulary) for index in range(count)]
    streams = await asyncio.gather(*(follow(stub, request, Stream()) for request in requests))
    return [Known(request, stream.tokens) for request, stream in zip(requests, streams, strict=True)]


def repeat(
    stub: Any, known: list[Known], streams: int, calm: asyncio.Event, report: StormReport
) -> list[asyncio.Task[None]]:
    """`streams` clients that ask known requests one after the other until it is calm."""
    return [asyncio.create_task(_client(stub, known, random.Random(index), calm, report)) for index in range(streams)]


async def _client(stub: Any, known: list[Known], rng: random.Random, calm: asyncio.Event, report: StormReport) -> None:
    while not calm.is_set():
        one, stream = rng.choice(known), Stream()
        report.streams += 1
        try:
            await follow(stub, one.request, stream)
        except grpc.aio.AioRpcError as error:
            report.faults.append(f"after {len(stream.tokens)} tokens: {error.code().name} {error.details()}")
            continue
        if stream.tokens != one.tokens:
            report.faults.append(f"{stream.tokens} instead of {one.tokens}")
        assert stream.finished is not None
        report.attempts_most = max(report.attempts_most, stream.finished.attempts)
        if stream.finished.attempts > 1:
            report.replanned += 1
            report.gaps_s.append(max((after - before for before, after in pairwise(stream.at_s)), default=0.0))
