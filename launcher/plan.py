"""`segue plan`: how to divide accelerators between prefill and decode for a trace and its objectives, by simulation."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launcher.options import parse_slo
from launcher.simulate_inputs import check_writable, policy_names, read_workload
from launcher.source_commit import source_commit
from segue.errors import ConfigError, SegueError
from simulator.hardware import Instance
from simulator.planning import Trial, instance_sizes, ranked, search
from simulator.report import Slo
from simulator.workload import Workload

SCHEMA = "segue-plan/1"

GOOD_SHARE = 0.9
"""Below it the objectives are not kept: more accelerators, or other objectives, are needed."""


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    trace: Annotated[Path, typer.Option(help="Requests: any format that `segue simulate` reads.")],
    gpus: Annotated[int, typer.Option(help="Accelerators to divide.")],
    slo: Annotated[str, typer.Option(help="Objectives in seconds; add ttft_factor=3 for 3x the unloaded prefill.")] = (
        "ttft=2,tpot=0.05"
    ),
    model: Annotated[str, typer.Option(help="Model, by name.")] = "llama3-70b",
    hardware: Annotated[str, typer.Option(help="Node, by name.")] = "h200",
    weights: Annotated[str, typer.Option(help="Type of weights: bf16, fp8, fp32.")] = "fp8",
    kv: Annotated[str, typer.Option(help="Type of K/V: bf16, fp8, fp32.")] = "fp8",
    policy: Annotated[str, typer.Option(help="Routing policy.")] = "segue",
    trace_format: Annotated[str, typer.Option(help="Format of the trace; auto looks at its first line.")] = "auto",
    start: Annotated[int, typer.Option(help="First request of the slice.")] = 0,
    count: Annotated[int, typer.Option(help="Requests of the slice; 0: all from --start on.")] = 300,
    speedup: Annotated[float, typer.Option(help="How much faster than recorded.")] = 1.0,
    spread: Annotated[bool, typer.Option(help="Spread requests that share a time stamp until the next one.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write every trial here.")] = None,
) -> None:
    """Find the best split of accelerators into prefill and decode instances, and say what limits it."""
    console = Console(stderr=True)
    try:
        objectives = _objectives(slo)
        check_writable(json_out)
        if len(policy_names(policy)) > 1:
            raise ConfigError(f"--policy: one of them, not {policy!r}")
        workload = read_workload(trace, trace_format, start, count, speedup, spread)
        longest = max(request.tokens_prompt + request.tokens_output for request in workload.requests)
        sizes, left_out = instance_sizes(Instance(model=model, node=hardware, weights=weights, kv=kv), gpus, longest)
    except (SegueError, ValueError) as error:
        console.print(f"segue: {error}", style="red", highlight=False)
        raise typer.Exit(2) from error
    trials, complete = _run(console, workload, sizes, gpus, objectives, policy.strip())
    if json_out is not None:
        json_out.write_bytes(_encoded(trials, left_out, objectives, complete))
    if trials:
        _show(trials, left_out, objectives, complete)
    raise typer.Exit(0 if complete else 130)


def _objectives(text: str) -> Slo:
    """TTFT is strict unless `ttft_factor` is given: otherwise a slower instance would have an easier objective."""
    given = parse_slo(text)
    ttft_s, tpot_s = given.get("slo_ttft", 2.0), given.get("slo_tpot", 0.05)
    if not (ttft_s > 0 and tpot_s > 0):
        raise ConfigError(f"--slo: {text!r} has an objective of 0 s, which nothing can meet")
    return Slo(ttft_us=ttft_s * 1e6, ttft_factor=given.get("slo_ttft_factor", 0.0), tpot_us=tpot_s * 1e6)


def _run(
    console: Console, workload: Workload, sizes: Sequence[Instance], gpus: int, slo: Slo, policy: str
) -> tuple[list[Trial], bool]:
    """Ctrl-C keeps what has been tried."""
    trials: list[Trial] = []
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating splits", total=None)

        def note(trial: Trial) -> None:
            trials.append(trial)
            progress.update(task, description=f"{len(trials)} tried, last {trial.split.label}", refresh=True)

        try:
            search(workload, sizes, gpus, slo, policy, note)
        except KeyboardInterrupt:
            return trials, False
    return trials, True


def _encoded(trials: Sequence[Trial], left_out: dict[int, str], slo: Slo, complete: bool) -> bytes:
    order = ranked(trials, slo)
    numbers = {
        "schema": SCHEMA,
        "version": importlib.metadata.version("segue"),
        "commit": source_commit(),
        "complete": complete,
        "slo": slo,
        "best": order[0] if order else None,
        "runner_up": order[1] if len(order) > 1 else None,
        "left_out": [{"accelerators": size, "reason": reason} for size, reason in left_out.items()],
        "trials": order,
    }
    return msgspec.json.format(msgspec.json.encode(numbers), indent=1) + b"\n"


def _show(trials: Sequence[Trial], left_out: dict[int, str], slo: Slo, complete: bool) -> None:
    order = ranked(trials, slo)
    output = Console()
    first = order[0].summary
    table = Table(
        title=f"{first.workload} ({', '.join(first.notes) or 'as recorded'}), {first.offered_per_s:.2f} requests/s, "
        f"digest {first.digest}{'' if complete else ' (part: ended early)'}"
    )
    for column in ("split", "in SLO %", "good/s", "TTFT p90 s", "TPOT p99 ms", "P/D busy %"):
        table.add_column(column, justify="left" if column == "split" else "right", no_wrap=column == "split")
    for trial in order:
        one = trial.summary
        table.add_row(
            trial.split.label,
            f"{100 * one.attainment:.1f}",
            f"{one.goodput_per_s:.2f}",
            f"{one.ttft_p90_s:.2f}",
            f"{one.tpot_p99_ms:.1f}",
            f"{100 * trial.busy_prefill:.0f}/{100 * trial.busy_decode:.0f}",
        )
    output.print(table)
    for name, trial in zip(("best", "runner-up"), order, strict=False):
        output.print(f"{name}: {trial.split.label}: {trial.reason}", highlight=False, soft_wrap=True)
    if first.attainment < GOOD_SHARE:
        output.print(
            f"no split that was tried keeps {GOOD_SHARE:.0%} of the requests within the objectives", style="bold"
        )
    for size, reason in left_out.items():
        output.print(f"not tried: TP {size}: {reason}", highlight=False, soft_wrap=True)
