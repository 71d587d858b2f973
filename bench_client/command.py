"""`segue bench`: the command line of the load generator."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import secrets
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench_client.lengths import parse_lengths
from bench_client.options import BenchOptions, check_options, parse_token_ids
from bench_client.replay import Replay
from bench_client.report import PLOTS_EXTRA, Facts, can_plot, prepare_folder, write_reports
from bench_client.run import Result, run
from bench_client.slo import parse_slo
from bench_client.view import View, show_summary
from segue.errors import ConfigError

API_KEY_VARIABLE = "OPENAI_API_KEY"

SEEDS = 1 << 31
"""A new seed for each run, because the prompts of the last one may still be in the server's prefix cache."""

EXIT_CONFIG, EXIT_NOTHING_WORKED = 2, 1


def register(app: typer.Typer) -> None:
    """Add `bench` to `app`."""
    app.command()(bench)


def bench(
    url: Annotated[str, typer.Option(help="Server, e.g. http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: keep so many requests open.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    trace: Annotated[str, typer.Option(help="Open loop: replay a .jsonl or .csv trace (docs/benchmarking.md).")] = "",
    requests: Annotated[int | None, typer.Option(help="Stop after so many requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="Stop sending after so many seconds.")] = None,
    slo: Annotated[str, typer.Option(help="Bounds of a good request, e.g. ttft=2000ms,tpot=50ms,e2e=10s.")] = "",
    input_len: Annotated[
        str, typer.Option(help="Prompt tokens: 128, uniform:64,256, normal:M,D, lognormal:M,S.")
    ] = "128",
    output_len: Annotated[str, typer.Option(help="Answer tokens, likewise.")] = "64",
    warmup: Annotated[int, typer.Option(help="Requests before the run that are not counted.")] = 0,
    arrival: Annotated[str, typer.Option(help="With --rate: poisson or constant.")] = "poisson",
    cut: Annotated[str, typer.Option("--slice", help="Of a trace: rows 100:400 or seconds 60:120s.")] = "",
    speed: Annotated[float, typer.Option(help="Of a trace: 2 is twice as fast.")] = 1.0,
    shrink: Annotated[int, typer.Option(help="Of a trace: divide lengths and blocks by this.")] = 1,
    spread: Annotated[bool, typer.Option("--spread", help="Of a trace: spread arrivals that share a tick.")] = False,
    skip_too_long: Annotated[
        bool, typer.Option("--skip-too-long", help="Leave out what the model cannot take.")
    ] = False,
    model: Annotated[str, typer.Option(help="Served model; default: the only one.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions (token ids, exact lengths) or chat.")] = "completions",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of exactly the length.")
    ] = True,
    token_ids: Annotated[
        str, typer.Option(help="Draw prompts from these ids, e.g. 1000-30000, not from /tokenize.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request has failed.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds that open requests get at the end.")] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same prompts and arrivals; default: drawn.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the reports; default: segue-bench-TIME.")] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="PNG figures; need the extra `reports`.")] = True,
) -> None:
    """Load an OpenAI-compatible server and measure TTFT, TPOT, ITL, E2E and goodput."""
    console = Console()
    view = View(console)
    try:
        options = BenchOptions(
            url=url.rstrip("/").removesuffix("/v1"),
            model=model,
            endpoint=endpoint,
            concurrency=concurrency,
            rate=rate,
            arrival=arrival,
            trace=trace,
            replay=Replay(cut=cut, speed=speed, shrink=shrink, spread=spread),
            skip_too_long=skip_too_long,
            tokens_input=parse_lengths(input_len, "--input-len"),
            tokens_output=parse_lengths(output_len, "--output-len"),
            requests=requests,
            seconds=duration,
            grace_s=grace,
            warmup=warmup,
            timeout_s=timeout,
            temperature=temperature,
            ignore_eos=ignore_eos,
            token_ids=parse_token_ids(token_ids),
            seed=secrets.randbelow(SEEDS) if seed is None else seed,
            slo=parse_slo(slo),
        )
        check_options(options)
        started = datetime.now(UTC)
        folder = output or Path(f"segue-bench-{started:%Y%m%d-%H%M%S}")
        prepare_folder(folder)
        result = asyncio.run(_interruptible(options, view))
    except ConfigError as error:
        typer.echo(f"segue bench: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from error
    _report(result, options, started, folder, console, plots)
    raise typer.Exit(0 if result.summary.requests_ok else EXIT_NOTHING_WORKED)


async def _interruptible(options: BenchOptions, view: View) -> Result:
    """Ctrl-C and SIGTERM end the load, not the report."""
    task = asyncio.create_task(run(options, os.environ.get(API_KEY_VARIABLE, ""), view))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError as error:
        raise ConfigError("stopped before a request was sent") from error


def _report(
    result: Result, options: BenchOptions, started: datetime, folder: Path, console: Console, plots: bool
) -> None:
    view = View(console)
    view.say(f"{result.model}: {options.mode}; {result.workload}; seed {options.seed}\n")
    show_summary(console, result.summary, options.slo)
    if plots and not can_plot():
        view.say(f"no figures: {PLOTS_EXTRA}")
    facts = Facts(
        version=importlib.metadata.version("segue"),
        started_at=started.isoformat(timespec="milliseconds"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    )
    files = write_reports(result, options, facts, folder, plots=plots and can_plot())
    view.say(f"\nreport     {files[0]}")
