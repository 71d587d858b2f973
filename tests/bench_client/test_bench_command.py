"""`segue bench` as it is typed, against a gateway in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_answers import full_answer, word_tokenizer
from gateway_front import serving
from typer.testing import CliRunner

from bench_client import report
from bench_client.alphabet import WORDS
from conductor.gateway.testing import FakeConductor, Script, toy_card
from launcher.cli import app
from segue.config import FrontConfig
from segue.errors import Overloaded
from segue.model_card import ModelCard

MAX_MODEL_LEN = 1024


class Server:
    """A gateway in a thread; `prompts` are the token counts and first tokens that it was asked for."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self.url = ""
        self.prompts: list[tuple[int, ...]] = []
        self.reply = full_answer
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def _answer(self, request) -> Script:  # type: ignore[no-untyped-def]
        tokens = memoryview(request.token_ids).cast("I")
        self.prompts.append(tuple(tokens[: request.tokens_prompt]))
        return self.reply(request)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        conductor = FakeConductor([self._card], self._answer)
        async with serving(conductor, FrontConfig(model_names=("toy",))) as front:
            self.url = front.http_url
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(toy_card(max_model_len=MAX_MODEL_LEN)) as running:
        yield running


def bench(*arguments: object):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def numbers(folder: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((folder / "result.json").read_text())


def test_a_closed_loop_writes_every_report(server: Server, tmp_path: Path) -> None:
    ran = bench(
        "--url", server.url, "--concurrency", 3, "--requests", 9, "--warmup", 2, "--input-len", "uniform:20,40",
        "--output-len", 5, "--slo", "ttft=30s,tpot=30s", "--output", tmp_path, "--seed", 1,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    summary = numbers(tmp_path)["summary"]
    assert (summary["requests_ok"], summary["tokens_output"], summary["good_share"]) == (9, 45, 1.0)
    assert summary["tokens_input"] == sum(len(prompt) for prompt in server.prompts[2:])
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 9
    for name in ("latencies.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page.replace(server.url, "")
    assert "100.0% of requests meet ttft" in ran.output


def test_the_same_seed_asks_the_same(server: Server, tmp_path: Path) -> None:
    common = ("--url", server.url, "--rate", 500, "--requests", 6, "--no-plots", "--output", tmp_path)
    for seed in (4, 4, 5):
        assert bench(*common, "--seed", seed).exit_code == 0
    one, again, other = (sorted(server.prompts[at : at + 6]) for at in (0, 6, 12))
    assert one == again != other


def test_without_a_seed_no_prompt_repeats(server: Server, tmp_path: Path) -> None:
    """The prefix cache of the server would answer for it."""
    for _ in range(2):
        assert (
            bench(
                "--url", server.url, "--concurrency", 2, "--requests", 3, "--no-plots", "--output", tmp_path
            ).exit_code
            == 0
        )
    assert len(set(server.prompts)) == 6


def test_a_trace_is_replayed_with_its_lengths_and_shared_prefixes(server: Server, tmp_path: Path, data: Path) -> None:
    ran = bench(
        "--url", server.url, "--trace", data / "conversation_12.jsonl", "--shrink", 128, "--speed", 100,
        "--output", tmp_path, "--no-plots",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    rows = [json.loads(line) for line in (data / "conversation_12.jsonl").read_text().splitlines()]
    assert sorted(map(len, server.prompts)) == sorted(-(-row["input_length"] // 128) for row in rows)
    assert len({prompt[:4] for prompt in server.prompts}) == 1  # block 0 of all, 512 / 128 tokens
    assert len({prompt[:8] for prompt in server.prompts}) > 1
    assert "bursts kept" in ran.output


def test_requests_that_the_model_cannot_take_are_told_not_dropped(server: Server, tmp_path: Path, data: Path) -> None:
    trace = ("--url", server.url, "--trace", data / "sharegpt_8_lengths.csv", "--speed", 1000, "--output", tmp_path)
    refused = bench(*trace)
    assert refused.exit_code == 2
    assert "6 of 8 requests are longer than the model's 1024 tokens" in refused.output
    ran = bench(*trace, "--skip-too-long", "--no-plots")
    assert ran.exit_code == 0, ran.output
    assert "6 of 8 rows too long for the model left out" in ran.output
    assert numbers(tmp_path)["summary"]["requests"] == 2


def test_the_chat_api_is_asked_with_text_of_the_length(tmp_path: Path) -> None:
    with Server(toy_card(word_tokenizer(WORDS))) as server:
        common = ("--url", server.url, "--endpoint", "chat", "--concurrency", 1, "--requests", 1, "--no-plots")
        for length in (30, 50):
            ran = bench(*common, "--input-len", length, "--output", tmp_path)
            assert ran.exit_code == 0, ran.output
    short, long = map(len, server.prompts)
    assert long - short == 20


def test_the_chat_api_needs_text_of_a_known_length(server: Server, tmp_path: Path) -> None:
    """The byte tokenizer joins some letters."""
    ran = bench("--url", server.url, "--endpoint", "chat", "--concurrency", 1, "--requests", 1, "--output", tmp_path)
    assert ran.exit_code == 2
    assert "use --endpoint completions" in ran.output


def test_failures_are_counted_by_reason_and_fail_the_command(server: Server, tmp_path: Path) -> None:
    refusal = Overloaded("the queue is full", resource="queue", retry_after_ms=10)
    server.reply = lambda request: Script(reject=refusal)
    ran = bench("--url", server.url, "--concurrency", 2, "--requests", 4, "--output", tmp_path)
    assert ran.exit_code == 1
    assert "4 x http 429 overloaded: the queue is full" in ran.output
    assert numbers(tmp_path)["summary"]["errors"] == {"http 429 overloaded": 4}


def test_ctrl_c_ends_the_load_and_still_reports(server: Server, tmp_path: Path) -> None:
    def reply(request) -> Script:  # type: ignore[no-untyped-def]
        if len(server.prompts) < 5:
            return full_answer(request)
        os.kill(os.getpid(), signal.SIGINT)
        return Script(hang=True)

    server.reply = reply
    ran = bench("--url", server.url, "--concurrency", 1, "--duration", 600, "--output", tmp_path, "--no-plots")
    assert ran.exit_code == 0, ran.output
    assert "stopped early" in ran.output
    summary = numbers(tmp_path)["summary"]
    assert (summary["requests_ok"], summary["errors"]) == (4, {"unfinished": 1})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give one of --concurrency, --rate, --trace"),
        (("--concurrency", 1, "--requests", 1, "--model", "other"), "'other' is not served; models: toy"),
        (("--concurrency", 1, "--requests", 1, "--input-len", 1000, "--output-len", 100), "1100 tokens together"),
        (("--trace", "none.jsonl"), "none.jsonl"),
        (("--concurrency", 1, "--requests", 1, "--slo", "ttft=soon"), "--slo: 'ttft=soon'"),
    ],
)
def test_what_cannot_work_is_told_before_the_load(
    server: Server, tmp_path: Path, arguments: tuple[object, ...], told: str
) -> None:
    ran = bench("--url", server.url, *arguments, "--output", tmp_path)
    assert ran.exit_code == 2
    assert told in ran.output
    assert server.prompts == []


def test_without_matplotlib_the_report_says_what_is_missing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    ran = bench("--url", server.url, "--concurrency", 1, "--requests", 1, "--output", tmp_path)
    assert ran.exit_code == 0
    assert "pip install matplotlib" in ran.output
    assert not (tmp_path / "latencies.png").exists()


def test_texts_of_the_server_cannot_become_markup(server: Server, tmp_path: Path) -> None:
    refusal = Overloaded("<script>alert(1)</script>", resource="queue", retry_after_ms=10)
    server.reply = lambda request: Script(reject=refusal)
    bench("--url", server.url, "--concurrency", 1, "--requests", 1, "--output", tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text()
