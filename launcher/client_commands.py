"""`segue generate`, `chat`, `status` and `scale`: clients of a running cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from launcher.client_view import cluster_table, scale_line, summary_line
from launcher.rpc_client import ClientError, Finished, SegueClient, Text, Turn
from segue.limits import INSTANCES_MAX
from segue.pool_messages import InstanceChange, InstanceState

DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, typer.Option(help="host:port of the gRPC front door.")]
Model = Annotated[str, typer.Option(help="Served model; default: the only one.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Tokens to generate; default: what the model leaves.")]
MinTokens = Annotated[int | None, typer.Option(min=0)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default 1.")]
TopK = Annotated[int | None, typer.Option(min=0)]
TopP = Annotated[float | None, typer.Option()]
MinP = Annotated[float | None, typer.Option()]
PresencePenalty = Annotated[float | None, typer.Option()]
FrequencyPenalty = Annotated[float | None, typer.Option()]
RepetitionPenalty = Annotated[float | None, typer.Option()]
Seed = Annotated[int | None, typer.Option(min=0, help="Repeats the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="Go on to --max-tokens.")]
Timeout = Annotated[float | None, typer.Option(help="Deadline in seconds.")]

QUIT = ("/quit", "/exit")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(generate)
    app.command()(chat)
    app.command()(status)
    app.command(context_settings={"ignore_unknown_options": True})(scale)  # "-1" is a number out of range, no option


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: Model = "",
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = None,
    timeout: Timeout = None,
) -> None:
    """Continue PROMPT and say how long it took."""
    sampling = {
        name: value for name, value in locals().items() if name not in ("prompt", "address", "model", "timeout")
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    with connected(address) as client:
        show(client, text, model, timeout, sampling)


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    address: Address = DEFAULT_ADDRESS,
    model: Model = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
) -> None:
    """Talk to the model, with its chat template."""
    named = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    sampling = {name: value for name, value in locals().items() if name in named}
    turns = [Turn("system", system)] if system else []
    with connected(address) as client:
        for said in [message] if message is not None else typed():
            turns.append(Turn("user", said))
            turns.append(Turn("assistant", show(client, turns, model, timeout, sampling)))


def status(address: Address = DEFAULT_ADDRESS) -> None:
    """Instances, their load and their pages."""
    with connected(address) as client:
        Console().print(cluster_table(client.cluster()))


def scale(
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    instances: Annotated[int, typer.Argument(min=0, max=INSTANCES_MAX, help="How many the pool shall have.")],
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Give a pool of the running cluster another size; what runs goes on. Ctrl-C ends the watching, not the scaling."""
    failed = False
    with connected(address) as client:
        for event in client.scale(pool, instances):
            failed = failed or (isinstance(event, InstanceChange) and event.state is InstanceState.FAILED)
            typer.echo(scale_line(pool, event))
    raise typer.Exit(1 if failed else 0)


@contextmanager
def connected(address: str) -> Iterator[SegueClient]:
    """A client; what goes wrong is told in one line, with exit status 1."""
    try:
        with SegueClient(address) as client:
            client.connect()
            yield client
    except ClientError as error:
        typer.echo(f"segue: {error} [{error.status}]", err=True)
        raise typer.Exit(1) from error


def show(
    client: SegueClient,
    prompt: str | Sequence[Turn],
    model: str,
    timeout_s: float | None,
    sampling: dict[str, Any],
) -> str:
    """Print pieces as they come and the summary after them; returns the text. The summary goes to standard error, so
    that the text alone can be piped."""
    texts: list[str] = []
    for piece in client.generate(prompt, model=model, timeout_s=timeout_s, **sampling):
        match piece:
            case Text():
                texts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            case Finished():
                sys.stdout.write("\n")
                sys.stdout.flush()
                Console(stderr=True, soft_wrap=True).print(summary_line(piece), style="dim", markup=False)
    return "".join(texts)


def typed() -> Iterator[str]:
    """Lines of the person at the terminal, until /quit, end of file or Ctrl-C. Prompts go to standard error, and only
    to a person: the answers to a piped conversation are its whole standard output."""
    is_person = sys.stdin.isatty()
    console = Console(stderr=True, quiet=not is_person)
    console.print("/quit, Ctrl-D or Ctrl-C ends the conversation.", style="dim")
    while True:
        try:
            said = console.input("[bold]> [/bold]") if is_person else input()
        except (EOFError, KeyboardInterrupt):
            return
        if said.strip() in QUIT:
            return
        if said.strip():
            yield said
