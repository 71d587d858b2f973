"""The client commands against a real gateway, run as a person runs them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import grpc
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from conductor.gateway.request_fields import unpack_token_ids
from conductor.gateway.server import build_gateway
from conductor.gateway.testing import FakeConductor, Script, byte_level_tokenizer, toy_card
from conductor.ports import RoutedRequest
from launcher.client_commands import register
from launcher.client_view import cluster_table
from launcher.rpc_client import Cluster, Instance
from segue.config import FrontConfig
from segue.errors import Overloaded

TOKENIZER = byte_level_tokenizer()
app = typer.Typer()
register(app)


def run(*arguments: str, typed: str | None = None):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, [*arguments], input=typed)


def saying(text: str) -> Callable[[RoutedRequest], Script]:
    tokens = [*TOKENIZER.encode(text).ids, TOKENIZER.token_to_id("<|im_end|>")]
    return lambda request: Script(tokens=tokens, tokens_cached=1)


class ServerThread:
    """A gateway on a loop of its own, so that blocking clients can be tried."""

    def __init__(self) -> None:
        self.conductor = FakeConductor([toy_card()], saying("hello world"))
        self.address: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    async def _serve(self) -> None:
        gateway = build_gateway(FrontConfig(), self.conductor)
        self.conductor.deliver = gateway.table.on_tokens
        server = grpc.aio.server()
        gateway.add_to(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        await gateway.start(address)
        self.address.set_result(address)
        await self._stop.wait()
        await gateway.close()
        await server.stop(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[ServerThread]:
    thread = ServerThread()
    yield thread
    thread.close()


def test_generate_prints_the_text_and_then_who_served_it_how_fast(server: ServerThread) -> None:
    result = run("generate", "hi", "--address", server.address.result())
    assert result.exit_code == 0
    assert result.stdout == "hello world\n"
    for part in ("TTFT", "TPOT", "tokens (stop)", "prompt 2, cached 1", "P p0", "D d0"):
        assert part in result.stderr


def test_sampling_options_reach_the_cluster(server: ServerThread) -> None:
    options = ["--temperature", "0", "--max-tokens", "7", "--top-k", "3", "--seed", "5", "--min-tokens", "1"]
    run("generate", "hi", "--address", server.address.result(), *options, "--stop", "a", "--stop", "b", "--ignore-eos")
    given = server.conductor.submitted[0].sampling
    assert (given.temperature, given.max_tokens, given.top_k, given.seed, given.min_tokens) == (0.0, 7, 3, 5, 1)
    assert given.ignore_eos


def test_a_prompt_can_come_from_standard_input(server: ServerThread) -> None:
    run("generate", "-", "--address", server.address.result(), typed="from a pipe")
    assert TOKENIZER.decode(unpack_token_ids(server.conductor.submitted[0].token_ids)) == "from a pipe"


def test_chat_with_one_message_uses_the_chat_template(server: ServerThread) -> None:
    result = run("chat", "hi", "--system", "be brief", "--address", server.address.result())
    assert result.stdout == "hello world\n"
    prompt = TOKENIZER.decode(unpack_token_ids(server.conductor.submitted[0].token_ids), skip_special_tokens=False)
    assert prompt == ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_remembers_what_was_said(server: ServerThread) -> None:
    result = run("chat", "--address", server.address.result(), typed="first\n\nsecond\n/quit\nthird\n")
    assert result.exit_code == 0
    assert len(server.conductor.submitted) == 2
    prompt = TOKENIZER.decode(unpack_token_ids(server.conductor.submitted[1].token_ids))
    assert prompt == "user\nfirst\nassistant\nhello world\nuser\nsecond\nassistant\n"


def test_status_shows_instances_and_pages(server: ServerThread) -> None:
    result = run("status", "--address", server.address.result())
    assert result.exit_code == 0
    for part in ("p0", "d0", "toy"):
        assert part in result.stdout


def test_status_of_a_large_cluster_fits_eighty_columns() -> None:
    counts = dict.fromkeys(("pages_active", "pages_cached", "pages_held", "pages_free", "pages_total"), 99_999)
    instance = Instance(
        name="prefill-10",
        role="prefill",
        state="draining",
        model="toy",
        running=256,
        waiting=4096,
        tokens_queued=999_999,
        pages_quarantined=0,
        block_size=16,
        preemptions=9999,
        pid=1,
        **counts,
    )
    cluster = Cluster(instances=[instance], models=[], requests_queued=0, requests_live=0, version="1")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(cluster_table(cluster))
    row = console.export_text().splitlines()[-1]
    assert row.split() == [
        "prefill-10",
        "prefill",
        "draining",
        "256",
        "4096",
        "999999",
        "99999",
        "99999",
        "99999",
        "99999",
        "9999",
    ]


def test_without_a_server_the_error_names_the_address() -> None:
    result = run("status", "--address", "127.0.0.1:9")
    assert result.exit_code == 1
    assert "no Segue gateway answers at 127.0.0.1:9" in result.stderr


def test_a_refusal_is_one_line_with_its_status(server: ServerThread) -> None:
    result = run("generate", "hi", "--temperature", "-1", "--address", server.address.result())
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "temperature" in result.stderr and "[INVALID_ARGUMENT]" in result.stderr


def test_overload_says_when_to_try_again(server: ServerThread) -> None:
    error = Overloaded("queue is full", resource="queue", retry_after_ms=1500)
    server.conductor.reply = lambda request: Script(refuse=error)
    result = run("generate", "hi", "--address", server.address.result())
    assert "queue is full (try again in 1.5 s) [RESOURCE_EXHAUSTED]" in result.stderr


def test_a_piped_conversation_prints_the_answers_and_nothing_else(server: ServerThread) -> None:
    answered = run("chat", "--address", server.address.result(), typed="one\n\ntwo\n")
    assert answered.exit_code == 0, answered.output
    assert ">" not in answered.stdout and "/quit" not in answered.stdout
    assert len(answered.stdout.splitlines()) == 2


def test_no_tokens_at_all_are_refused_before_anything_is_sent(server: ServerThread) -> None:
    refused = run("generate", "hello", "--address", server.address.result(), "--max-tokens", "0")
    assert refused.exit_code == 2
    assert "--max-tokens" in refused.output


def test_a_negative_size_is_refused_by_the_name_of_the_field_and_its_limit() -> None:
    result = run("scale", "decode", "-1")
    assert result.exit_code == 2
    assert "'instances'" in result.stderr
    assert "greater than or equal to 0" in result.stderr


def test_an_option_of_scale_that_there_is_not_is_refused() -> None:
    assert run("scale", "decode", "2", "--adress", "nowhere:1").exit_code == 2
