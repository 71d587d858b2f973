"""`segue explain [REQUEST_ID]`: why a request went where it went, and how right the prediction was; recent requests."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.client_commands import DEFAULT_ADDRESS, Address, connected
from launcher.rpc_client import ExplainedAttempt, ExplainedChoice

RECENT = 20

FINISHED = ("stop", "length")
"""Reasons for an end that is none of a failure or a cancel."""


def register(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    request_id: Annotated[
        str, typer.Argument(help="As given by the client, or as the answer says. Without it: recent requests.")
    ] = "",
    last: Annotated[int, typer.Option(min=1, help="How many recent requests.")] = RECENT,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the instances that were considered for a recent request, the predictions, and what really happened."""
    with connected(address) as client:
        attempts = client.explain(request_id) if request_id else client.recent(last)
    console = Console()
    if not request_id:
        console.print(recent_table(attempts) if attempts else "no decision yet")
        return
    if not attempts:
        typer.echo(f"segue: this Conductor remembers no request {request_id}", err=True)
        raise typer.Exit(1)
    for attempt in attempts:
        for line in headlines(attempt):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if attempt.choices:
            console.print(choices_table(attempt))
        for line in notes(attempt):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def headlines(attempt: ExplainedAttempt) -> list[str]:
    """What was decided and why; then prediction against reality, where there is one."""
    tenant = f", tenant {attempt.tenant}" if attempt.tenant else ""
    lines = [
        f"{attempt.request_id} attempt {attempt.attempt}: {attempt.decision} after {_ms(attempt.waited_us)} "
        f"in the queue ({attempt.tokens_known} tokens, priority {attempt.priority}{tenant})",
        f"reason: {attempt.reason}",
        f"state: {state(attempt)}",
    ]
    chosen = attempt.chosen
    if chosen is not None and attempt.prefill_let_go:
        lines.append(f"{chosen.prefill} was let go: {chosen.decode} had all but one block and computed the rest itself")
    if chosen is not None and chosen.is_predicted:
        lines += _regret("TTFT", chosen.ttft_us, attempt.ttft_us) + _regret("TPOT", chosen.tpot_us, attempt.tpot_us)
    return lines


def state(attempt: ExplainedAttempt) -> str:
    if attempt.decision != "routed":
        return attempt.decision
    return f"finished ({attempt.ended})" if attempt.ended in FINISHED else attempt.ended or "running"


def choices_table(attempt: ExplainedAttempt) -> Table:
    """At most 80 columns wide; what does not fit is said by `notes`."""
    shown, total = len(attempt.choices), attempt.choices_total
    title = f"{shown} of {total} choices, the best ranked first" if total > shown else "choices, the best ranked first"
    table = _table(f"{title}; prompt tokens, times in ms")
    for column in ("", "prefill", "decode"):
        table.add_column(column, no_wrap=True)
    for column in ("cost", "new", "cached", "queue", "TTFT", "q90", "batch", "TPOT", "q90"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, choice in enumerate(attempt.choices, start=1):
        table.add_row(str(number), *_choice_cells(choice, computes=choice.prefill and not _let_go(attempt, choice)))
    return table


def notes(attempt: ExplainedAttempt) -> list[str]:
    """Below the table: what was chosen, where prefixes come from, which objective a choice would miss."""
    lines = []
    for number, choice in enumerate(attempt.choices, start=1):
        told = [f"prefix from {choice.source}"] if choice.source else []
        told += [choice.verdict] if choice.verdict else []
        if _let_go(attempt, choice):
            told.append("prefilled at decode")
        if told:
            lines.append(f"{number}: {', '.join(told)}")
    return lines


def recent_table(attempts: list[ExplainedAttempt]) -> Table:
    table = _table("recent decisions, the newest first")
    table.add_column("request", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    for column in ("P", "D"):
        table.add_column(column, no_wrap=True)
    table.add_column("state", overflow="fold")
    for attempt in attempts:
        again = f" (attempt {attempt.attempt})" if attempt.attempt > 1 else ""
        chosen = attempt.chosen
        prefill = "-" if chosen is None or attempt.prefill_let_go else chosen.prefill or "-"
        decode = "-" if chosen is None else chosen.decode
        table.add_row(attempt.request_id + again, f"{attempt.age_us / 1e6:.1f} s", prefill, decode, state(attempt))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _let_go(attempt: ExplainedAttempt, choice: ExplainedChoice) -> bool:
    return attempt.prefill_let_go and choice.verdict == "chosen"


def _choice_cells(choice: ExplainedChoice, computes: object) -> tuple[str, ...]:
    terms = ["-"] * 6
    if choice.is_predicted:
        times = (choice.queue_us, choice.ttft_us, choice.ttft_q90_us)
        steps = (choice.tpot_us, choice.tpot_q90_us)
        terms = [f"{us / 1e3:.0f}" for us in times] + [f"{choice.batch:.1f}"] + [f"{us / 1e3:.1f}" for us in steps]
    counts = (f"{choice.cost:.3g}", str(choice.tokens_compute), str(choice.tokens_cached))
    return (choice.prefill if computes else "(decode)", choice.decode, *counts, *terms)


def _regret(name: str, predicted_us: float, actual_us: float) -> list[str]:
    if not actual_us:
        return []
    return [f"{name}: predicted {_ms(predicted_us)}, actual {_ms(actual_us)}, regret {_ms(actual_us - predicted_us)}"]


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"
