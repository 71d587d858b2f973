"""`segue simulate`: replay a trace through the production cores, compare policies, sweep a parameter, inject faults."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from launcher.simulate_view import comparison_table
from segue.errors import ConfigError, SegueError
from simulator.cluster import Cluster, ClusterSpec, check_spec
from simulator.hardware import Instance
from simulator.policies import POLICIES
from simulator.report import RunSummary, Slo, summarise
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up, with_bursts_spread

SWEEPS = {
    "rate": float,
    "prefill": int,
    "decode": int,
    "conductors": int,
    "view_delay_us": int,
    "noise": float,
    "seed": int,
}
"""What `--sweep` may vary: speed-up of the trace, or a field of the cluster."""


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Requests: Mooncake or Qwen-Bailian JSONL, Azure, BurstGPT, lengths CSV.")
    ] = None,
    trace_format: Annotated[str, typer.Option(help="Format of the trace; auto looks at its first line.")] = "auto",
    policy: Annotated[str, typer.Option(help=f"One or several, by comma: {', '.join(POLICIES)}.")] = "segue",
    sweep: Annotated[str, typer.Option(help=f"NAME=V1,V2,... with NAME one of {', '.join(SWEEPS)}.")] = "",
    model: Annotated[str, typer.Option(help="Model, by name.")] = "llama3-70b",
    hardware: Annotated[str, typer.Option(help="Node, by name.")] = "h200",
    accelerators: Annotated[int, typer.Option(help="Accelerators of one instance.")] = 1,
    weights: Annotated[str, typer.Option(help="Type of weights: bf16, fp8, fp32.")] = "fp8",
    kv: Annotated[str, typer.Option(help="Type of K/V: bf16, fp8, fp32.")] = "fp8",
    prefill: Annotated[int, typer.Option(help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode instances.")] = 8,
    aggregated: Annotated[int, typer.Option(help="Instances that do both.")] = 0,
    kv_tokens: Annotated[int, typer.Option(help="K/V tokens of an instance; 0: what fits its memory.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens of a K/V block; 0: of a prefix id of the trace.")] = 0,
    start: Annotated[int, typer.Option(help="First request of the trace.")] = 0,
    count: Annotated[int, typer.Option(help="Requests; 0: all.")] = 0,
    speedup: Annotated[float, typer.Option(help="How much faster than recorded.")] = 1.0,
    spread: Annotated[bool, typer.Option(help="Spread requests that share a time stamp until the next one.")] = False,
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token, or 3x the unloaded time if more.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Milliseconds per output token.")] = 50.0,
    refuse: Annotated[
        bool, typer.Option(help="Let policies that predict refuse what would miss the objective.")
    ] = False,
    noise: Annotated[float, typer.Option(help="Relative standard deviation of step times.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    faults: Annotated[
        bool, typer.Option(help="Inject faults into small clusters instead, and check every invariant.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="With --faults: how many seeds, from --seed on.")] = 1_000,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
) -> None:
    """Replay a trace on a simulated cluster of production cores and report what its clients would see."""
    console = Console(stderr=True)
    try:
        if faults:
            raise typer.Exit(_inject(console, seed, seeds))
        if trace is None:
            raise ConfigError("simulate: --trace FILE is needed (or --faults)")
        workload = _workload(trace, trace_format, start, count, speedup, spread)
        instance = Instance(model=model, node=hardware, accelerators=accelerators, weights=weights, kv=kv)
        slo = Slo(ttft_us=slo_ttft * 1e6, tpot_us=slo_tpot * 1e3)
        spec = ClusterSpec(
            prefill=prefill,
            decode=decode,
            aggregated=aggregated,
            cost=instance.cost_model(),
            link=instance.network(),
            kv_tokens=kv_tokens or instance.kv_tokens_total(),
            block_size=block_size or max(16, workload.span_tokens),
            refuse_ttft_us=slo.ttft_us if refuse else float("inf"),
            refuse_tpot_us=slo.tpot_us if refuse else float("inf"),
            noise=noise,
            seed=seed,
        )
        variants = _variants(spec, workload, sweep)
        for _, varied in variants:
            check_spec(varied)
        runs = [(name, changed, spec_) for name, (changed, spec_) in itertools.product(_policies(policy), variants)]
    except (SegueError, ValueError) as error:
        console.print(f"segue: {error}", style="red", highlight=False)
        raise typer.Exit(2) from error
    summaries = _run_all(console, runs, slo)
    output = Console()
    output.print(comparison_table(summaries, output.width))
    if json_out is not None:
        json_out.write_bytes(msgspec.json.format(msgspec.json.encode(summaries)))
    if len(summaries) < len(runs) or not all(each.complete for each in summaries):
        raise typer.Exit(130)


Run = tuple[str, Workload, ClusterSpec]


def _run_all(console: Console, runs: Sequence[Run], slo: Slo) -> list[RunSummary]:
    """Ctrl-C keeps what is there: the run that was going on is marked as incomplete."""
    summaries: list[RunSummary] = []
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        for name, workload, spec in runs:
            task = progress.add_task(name, total=len(workload.requests))
            cluster = Cluster(spec, workload, name)
            complete = True
            try:
                cluster.run(lambda ended, _, task=task: progress.update(task, completed=ended))  # type: ignore[misc]
            except KeyboardInterrupt:
                complete = False
            progress.update(task, completed=len(workload.requests))
            summaries.append(summarise(cluster, name, slo, complete=complete))
            if not complete:
                break
    return summaries


def _inject(console: Console, first: int, count: int) -> int:
    from simulator.faults import run_campaign

    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("faults", total=count)
        failures = run_campaign(range(first, first + count), lambda done: progress.update(task, completed=done))
    for failure in failures:
        console.print(f"seed {failure.seed}: {failure.message}", style="red", highlight=False)
    console.print(f"{count - len(failures)} of {count} seeds kept every invariant", highlight=False)
    return 1 if failures else 0


def _workload(trace: Path, kind: str, start: int, count: int, speedup: float, spread: bool) -> Workload:
    workload = read_trace(trace, kind)
    if start or count:
        workload = sliced(workload, start=start, count=count or None)
    if not workload.requests:
        raise ConfigError(f"{trace}: no requests from {start} on")
    if spread:
        workload = with_bursts_spread(workload)
    return workload if speedup == 1.0 else sped_up(workload, speedup)


def _policies(names: str) -> list[str]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return chosen


def _variants(spec: ClusterSpec, workload: Workload, sweep: str) -> list[tuple[Workload, ClusterSpec]]:
    """The workload and the cluster at each point of the sweep."""
    if not sweep:
        return [(workload, spec)]
    name, _, listed = sweep.partition("=")
    if name not in SWEEPS or not listed:
        raise ConfigError(f"--sweep {sweep!r}: NAME=V1,V2,... with NAME one of {', '.join(SWEEPS)}")
    try:
        values: list[Any] = [SWEEPS[name](value) for value in listed.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sweep {sweep!r}: {error}") from error
    if name == "rate":
        return [(sped_up(workload, value), spec) for value in values]
    return [(workload, msgspec.structs.replace(spec, **{name: value})) for value in values]
