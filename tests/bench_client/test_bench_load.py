"""Loops against a real gateway over HTTP: how many at once, when, until when, and what happens to failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from bench_answers import full_answer

from bench_client.exchange import Clock, exchange
from bench_client.lengths import Lengths
from bench_client.load import Extent, LoadRun, warm_up
from bench_client.prompts import Alphabet, PromptMaker
from bench_client.records import Exchange, PlannedRequest
from bench_client.target import BodyMaker, Target, TargetError
from bench_client.workload import arrivals, synthetic
from conductor.gateway.testing import Script
from conductor.ports import RoutedRequest
from segue.errors import Overloaded

BODIES = BodyMaker(
    PromptMaker(Alphabet(tuple(range(60, 90))), 1, 0),
    endpoint="completions",
    model="toy",
    sampling={"temperature": 0, "ignore_eos": True},
)


class Rig:
    """One client; `most_open` is the most requests it had open at once."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http, self.clock = http, Clock()
        self.open = self.most_open = 0

    async def send(self, planned: PlannedRequest, due_us: int | None) -> Exchange:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await exchange(self.http, BODIES.path, BODIES.body(planned), planned, self.clock, due_us)
        finally:
            self.open -= 1

    def load(self, **extent: object) -> LoadRun:
        return LoadRun(self.send, self.clock, Extent(**extent), lambda: None, lambda done: None)


@pytest.fixture
async def rig(start_server) -> AsyncIterator[Callable[..., object]]:
    async with httpx.AsyncClient(trust_env=False, headers={"content-type": "application/json"}) as http:

        async def start(reply: Callable[[RoutedRequest], Script] = full_answer, *, timeout_s: float = 30.0) -> Rig:
            http.base_url = (await start_server(reply)).http_url
            http.timeout = httpx.Timeout(timeout_s)
            return Rig(http)

        yield start


def requests(tokens_output: int = 6):  # type: ignore[no-untyped-def]
    return synthetic(Lengths("fixed", 12), Lengths("fixed", tokens_output), 1)


async def test_a_stream_is_stamped_counted_and_told_apart(rig) -> None:  # type: ignore[no-untyped-def]
    client = await rig()
    seen = await client.send(PlannedRequest(index=0, tokens_input=12, tokens_output=6), None)
    assert (seen.ok, seen.tokens_input, seen.tokens_output, seen.tokens_cached) == (True, 12, 6, 6)
    assert 1 <= len(seen.content_us) <= 6  # tokens that are ready together are one chunk
    assert seen.finish_reason == "length"
    stamps = [seen.sent_us, *seen.content_us, seen.ended_us]
    assert stamps == sorted(stamps)


async def test_a_closed_loop_keeps_so_many_open_and_ends_after_so_many(rig) -> None:  # type: ignore[no-untyped-def]
    client = await rig(lambda request: Script(tokens=[65] * 9, step_s=0.002))
    load = client.load(requests=20)
    await load.closed_loop(requests(), 5)
    assert sorted(done.index for done in load.exchanges) == list(range(20))
    assert client.most_open == 5


async def test_an_open_loop_sends_in_time_whatever_the_server_does(rig) -> None:  # type: ignore[no-untyped-def]
    client = await rig(lambda request: Script(hang=True))
    timed = (
        PlannedRequest(index=one.index, tokens_input=12, tokens_output=6, arrival_us=at)
        for one, at in zip(requests(), arrivals(1000, "constant", 1), strict=False)
    )
    load = client.load(requests=30, seconds=2.0, grace_s=0.0)
    await load.open_loop(timed)
    assert client.most_open == 30
    assert {done.error for done in load.exchanges} == {"unfinished"}
    due = sorted(done.scheduled_us for done in load.exchanges)
    assert [later - earlier for earlier, later in itertools.pairwise(due)] == [1000] * 29


async def test_the_server_frees_what_the_end_of_a_run_left_open(start_server) -> None:
    front = await start_server(lambda request: Script(hang=True))
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False) as http:
        load = Rig(http).load(seconds=0.3, grace_s=0.0)
        await load.closed_loop(requests(), 3)
    await front.idle()
    assert len(load.exchanges) == 3


async def test_a_cancel_keeps_what_was_seen(rig) -> None:  # type: ignore[no-untyped-def]
    answered = itertools.count()
    client = await rig(lambda request: full_answer(request) if next(answered) < 4 else Script(hang=True))
    load = client.load(seconds=60.0)
    running = asyncio.create_task(load.closed_loop(requests(), 2))
    while len(load.exchanges) < 4 or client.open < 2:
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(done.error for done in load.exchanges) == [""] * 4 + ["unfinished"] * 2


async def test_warm_up_returns_its_answers(rig) -> None:  # type: ignore[no-untyped-def]
    client = await rig()
    assert [done.ok for done in await warm_up(client.send, requests(), 7, 3)] == [True] * 7
    assert client.most_open == 3


REFUSAL = Overloaded("the queue is full", resource="queue", retry_after_ms=1000)


@pytest.mark.parametrize(
    ("reply", "kind", "detail"),
    [
        (lambda request: Script(reject=REFUSAL), "http 429 overloaded", "the queue is full"),
        (lambda request: Script(tokens=[65, 66], hang=True), "timeout", "ReadTimeout"),
    ],
)
async def test_failures_have_a_class(rig, reply, kind, detail) -> None:  # type: ignore[no-untyped-def]
    client = await rig(reply, timeout_s=0.5)
    seen = await client.send(PlannedRequest(index=0, tokens_input=12, tokens_output=6), None)
    assert (seen.error, seen.detail) == (kind, detail)


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b'data: {"choices":[{"text":"a"}]}\n\n', "stream cut"),
        (
            b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error":{"code":"unavailable","message":"m"}}\n\n',
            "error event unavailable",
        ),
        (b"data: {\n\n", "malformed chunk"),
        (b"data: []\n\n", "malformed chunk"),
        (b'data: {"choices":[7]}\n\n', "malformed chunk"),
        (b'data: {"choices":[{"text":"\xff"}]}\n\n', "malformed chunk"),
        (b"data: [DONE]\n\n", "empty stream"),
    ],
)
async def test_a_stream_that_is_no_answer_is_an_error(stream: bytes, kind: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=stream))
    async with httpx.AsyncClient(transport=transport, base_url="http://peer") as http:
        seen = await Rig(http).send(PlannedRequest(index=0, tokens_input=1, tokens_output=1), None)
    assert seen.error == kind


async def test_nobody_there_is_told_apart() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1", trust_env=False) as http:
        seen = await Rig(http).send(PlannedRequest(index=0, tokens_input=1, tokens_output=1), None)
    assert seen.error == "cannot connect"


async def test_the_only_model_is_found_and_a_wrong_one_told(start_server) -> None:
    front = await start_server()
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False) as http:
        assert (await Target(http).model("")).context_tokens_max == 4096
        with pytest.raises(TargetError, match="'llama' is not served; models: toy"):
            await Target(http).model("llama")


def test_arrivals_have_the_rate() -> None:
    times = list(itertools.islice(arrivals(50.0, "poisson", 3), 4001))
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(20_000, rel=0.05)
