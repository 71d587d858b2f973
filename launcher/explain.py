"""`segue explain REQUEST_ID`: why a request went where it went, and how right the prediction was."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.client_commands import DEFAULT_ADDRESS, Address, connected
from launcher.rpc_client import ExplainedAttempt, ExplainedChoice


def register(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    request_id: Annotated[str, typer.Argument(help="As given by the client, or as the answer says.")],
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the instances that were considered for a recent request, the predictions, and what really happened."""
    with connected(address) as client:
        attempts = client.explain(request_id)
    if not attempts:
        typer.echo(f"segue: this Conductor remembers no request {request_id}", err=True)
        raise typer.Exit(1)
    console = Console()
    for attempt in attempts:
        for line in headlines(attempt):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if attempt.choices:
            console.print(choices_table(attempt))


def headlines(attempt: ExplainedAttempt) -> list[str]:
    """What was decided and why; then prediction against reality, where there is one."""
    tenant = f", tenant {attempt.tenant}" if attempt.tenant else ""
    lines = [
        f"{attempt.request_id} attempt {attempt.attempt}: {attempt.decision} after {_ms(attempt.waited_us)} "
        f"in the queue ({attempt.tokens_known} tokens, priority {attempt.priority}{tenant})",
        f"reason: {attempt.reason}",
    ]
    chosen = next((choice for choice in attempt.choices if choice.verdict == "chosen"), None)
    if chosen is not None and chosen.is_predicted:
        lines += _regret("TTFT", chosen.ttft_us, attempt.ttft_us) + _regret("TPOT", chosen.tpot_us, attempt.tpot_us)
    return lines


def choices_table(attempt: ExplainedAttempt) -> Table:
    shown, total = len(attempt.choices), attempt.choices_total
    title = f"{shown} of {total} choices, the best ranked first" if total > shown else "choices, the best ranked first"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("prefill", "decode"):
        table.add_column(column, no_wrap=True)
    for column in ("cost", "com-\npute", "\ncached", "queue\nms", "TTFT\nms", "\nq90", "batch\n", "TPOT\nms", "\nq90"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for choice in attempt.choices:
        table.add_row(*_row(choice))
    return table


def _row(choice: ExplainedChoice) -> tuple[str, ...]:
    prefill = choice.prefill or "(at decode)"
    if choice.source:
        prefill += f" < {choice.source}"
    terms = ["-"] * 6
    if choice.is_predicted:
        times = (choice.queue_us, choice.ttft_us, choice.ttft_q90_us)
        steps = (choice.tpot_us, choice.tpot_q90_us)
        terms = [f"{us / 1e3:.0f}" for us in times] + [f"{choice.batch:.1f}"] + [f"{us / 1e3:.1f}" for us in steps]
    counts = (f"{choice.cost:.3g}", str(choice.tokens_compute), str(choice.tokens_cached))
    return (prefill, choice.decode, *counts, *terms, choice.verdict)


def _regret(name: str, predicted_us: float, actual_us: float) -> list[str]:
    if not actual_us:
        return []
    return [f"{name}: predicted {_ms(predicted_us)}, actual {_ms(actual_us)}, regret {_ms(actual_us - predicted_us)}"]


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"
