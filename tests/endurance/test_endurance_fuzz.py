"""Malformed requests by the thousand against a running cluster: no crash, no 5xx, nothing left behind.

Three sources: schemathesis on the OpenAPI document that the front serves, hostile and mangled bodies and messages, and
bytes that are no HTTP at all. The rows of the long run are in benchmarks/results/endurance.csv.
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from endurance_rows import record
from fuzz_clients import BACKPRESSURE, Fuzzer
from hypothesis import HealthCheck, Phase, given, seed, settings
from test_endurance_load import rss_bytes
from toy_cluster import InferenceStub, Stream, ToyCluster, booked, channel, follow, idle_within, request_of

from worker_runtime.toy_engine import toy_tokens

IDLE_S_MAX = 3.0
TOKENS_MAX = 3

ROUNDS = int(os.environ.get("SEGUE_FUZZ_ROUNDS", "3"))
"""Of ten thousand requests, one and a half minutes each."""

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


async def check_sound(cluster: ToyCluster, pids: dict[str, int], log: Path) -> None:
    """Nobody died, nothing is held, the log knows of no bug, and a good request is served as ever."""
    assert cluster.pids() == pids and cluster.ended is None
    async with channel(cluster.grpc) as connection:
        stub = InferenceStub(connection)
        stream = await follow(stub, request_of([1, 2, 3, 4, 5], 9, seed=4), Stream())
        assert stream.tokens == toy_tokens([1, 2, 3, 4, 5], 9, seed=4)
        assert await idle_within(stub, IDLE_S_MAX) is not None, "pages are still in use"
    assert booked(cluster.http) == 0
    said = log.read_text(errors="replace")
    assert not re.findall(r"internal error|Traceback", said), said[-4000:]


async def fuzz(fuzzer: Fuzzer, counts: dict[str, int]) -> None:
    for kind, count in counts.items():
        await fuzzer.run(kind, count)


async def test_a_thousand_malformed_requests_leave_the_cluster_as_it_was(cluster: ToyCluster) -> None:
    pids = cluster.pids()
    async with aclosing(Fuzzer(cluster.grpc, cluster.http, seed=1)) as fuzzer:
        await fuzz(fuzzer, {"json": 300, "grpc": 500, "http1": 60, "http2": 100})
    assert fuzzer.faults == []
    assert fuzzer.counts["json 400"] > 100 and fuzzer.counts["grpc INVALID_ARGUMENT"] > 200, fuzzer.counts
    assert fuzzer.counts["json 200"] > 20 and fuzzer.counts["grpc OK"] > 5, fuzzer.counts
    await check_sound(cluster, pids, cluster.front_log)


def conform(cluster: ToyCluster, path: str, examples: int) -> dict[int, int]:
    """Requests that schemathesis derives from the document, right ones and wrong ones; statuses that came back."""
    base = f"http://{cluster.http}"
    schema = schemathesis.openapi.from_dict(httpx.get(f"{base}/openapi.json", trust_env=False).json())
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=base, trust_env=False, timeout=60) as client:
        for mode in (schemathesis.GenerationMode.NEGATIVE, schemathesis.GenerationMode.POSITIVE):

            @seed(7)
            @given(schema[path]["POST"].as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def send(case: Any) -> None:
                status = _send(client, path, case)
                statuses[status] = statuses.get(status, 0) + 1

            send()
    return statuses


def _send(client: httpx.Client, path: str, case: Any) -> int:
    body = case.body
    if isinstance(body, dict) and "completions" in path:
        body = {"max_tokens": TOKENS_MAX, **body}
    headers = {"x-segue-deadline-ms": "500"}
    if isinstance(body, bytes | str):
        answer = client.post(path, content=body, headers=headers)
    elif type(body).__name__ == "NotSet":
        answer = client.post(path, headers=headers)
    else:
        answer = client.post(path, json=body, headers=headers)
    status = answer.status_code
    assert status < 500 or status in BACKPRESSURE, (status, answer.text, body)
    if status >= 400:
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    return status


@pytest.mark.parametrize("path", [*(pytest.param(path, marks=pytest.mark.slow) for path in PATHS[:2]), *PATHS[2:]])
async def test_schemathesis_finds_no_5xx(cluster: ToyCluster, path: str) -> None:
    pids = cluster.pids()
    statuses = await asyncio.to_thread(conform, cluster, path, 8)
    assert sum(statuses.values()) >= 14 and statuses.get(400, 0) > 0, statuses
    await check_sound(cluster, pids, cluster.front_log)


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_malformed_requests_by_tens_of_thousands(cluster: ToyCluster) -> None:
    """In rounds of ten thousand; the memory that the first third took must be enough for the others."""
    pids, rss = cluster.pids(), []
    found: dict[int, int] = {}
    for path in PATHS:
        for status, count in (await asyncio.to_thread(conform, cluster, path, 60)).items():
            found[status] = found.get(status, 0) + count
    async with aclosing(Fuzzer(cluster.grpc, cluster.http, seed=2)) as fuzzer:
        for _ in range(ROUNDS):
            await fuzz(fuzzer, {"json": 2000, "grpc": 6600, "http1": 400, "http2": 1000})
            assert fuzzer.faults == []
            await check_sound(cluster, pids, cluster.front_log)
            rss.append(rss_bytes(cluster))
            print(f"{sum(fuzzer.counts.values())} requests, {rss[-1] / 1e6:.1f} MB")
    total = sum(found.values()) + sum(fuzzer.counts.values())
    assert total >= ROUNDS * 10_000
    warm = max(ROUNDS // 3, 1)
    growth = rss[-1] / rss[warm - 1] - 1
    test = f"{ROUNDS * 10_000:,} malformed requests"
    for name, count in sorted({**{f"schemathesis {s}": n for s, n in found.items()}, **fuzzer.counts}.items()):
        record(test, name, count, "requests")
    record(test, f"memory after round {ROUNDS} over round {warm}", growth * 100, "%")
    assert growth < 0.05, rss
