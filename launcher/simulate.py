"""`segue simulate`: replay a trace through the production cores, compare policies, sweep a parameter, inject faults."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from bench_client.report import PLOTS_EXTRA, can_plot
from launcher.simulate_inputs import check_writable, lower_tiers, policy_names, read_workload
from launcher.simulate_view import comparison_table
from launcher.source_commit import source_commit
from segue.errors import ConfigError, SegueError
from simulator.cluster import Cluster, ClusterSpec, check_spec
from simulator.comparison import Circumstances, Run, render_json
from simulator.hardware import Instance
from simulator.policies import POLICIES
from simulator.report import Slo, summarise
from simulator.series import series_of
from simulator.workload import Workload, sped_up

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

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


class Variant(NamedTuple):
    """One point of a sweep."""

    label: str
    workload: Workload
    spec: ClusterSpec


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Requests: Mooncake or Qwen-Bailian JSONL, Azure, BurstGPT, lengths CSV.")
    ] = None,
    trace_format: Annotated[str, typer.Option(help="Format of the trace; auto looks at its first line.")] = "auto",
    policy: Annotated[
        str, typer.Option("--policy", "--compare", help=f"One or several, by comma: {', '.join(POLICIES)}.")
    ] = "segue",
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
    tiers: Annotated[
        str, typer.Option(help="Memory below each GPU: dram, or dram,ssd; NAME=TOKENS for another size than its share.")
    ] = "",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots here; needs the extra `reports`.")
    ] = None,
) -> None:
    """Replay a trace on a simulated cluster of production cores and report what its clients would see."""
    console = Console(stderr=True)
    try:
        if faults:
            raise typer.Exit(_inject(console, seed, seeds))
        if trace is None:
            raise ConfigError("simulate: --trace FILE is needed (or --faults)")
        for out in (json_out, html_out):
            check_writable(out)
        if html_out is not None and not can_plot():
            raise ConfigError(f"--html: {PLOTS_EXTRA}")
        for option, value in (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{option}: an objective must be positive, got {value:g}")
        workload = read_workload(trace, trace_format, start, count, speedup, spread)
        instance = Instance(model=model, node=hardware, accelerators=accelerators, weights=weights, kv=kv)
        slo = Slo(ttft_us=slo_ttft * 1e6, tpot_us=slo_tpot * 1e3)
        spec = ClusterSpec(
            prefill=prefill,
            decode=decode,
            aggregated=aggregated,
            cost=instance.cost_model(),
            link=instance.network(),
            kv_tokens=kv_tokens or instance.kv_tokens_total(),
            tiers=lower_tiers(instance, tiers),
            block_size=block_size or max(16, workload.span_tokens),
            targets=slo.targets(),
            refuse_ttft_us=slo.ttft_us if refuse else float("inf"),
            refuse_tpot_us=slo.tpot_us if refuse else float("inf"),
            noise=noise,
            seed=seed,
        )
        variants = _variants(spec, workload, sweep)
        for varied in variants:
            check_spec(varied.spec)
        plans = list(itertools.product(policy_names(policy), variants))
    except (SegueError, ValueError) as error:
        console.print(f"segue: {error}", style="red", highlight=False)
        raise typer.Exit(2) from error
    runs = _run_all(console, plans, slo)
    about = Circumstances(
        version=importlib.metadata.version("segue"),
        commit=source_commit(),
        command=shlex.join(["segue", *sys.argv[1:]]),
        cluster=_in_words(instance, spec),
        slo=slo,
    )
    output = Console()
    output.print(comparison_table(runs, output.width))
    if json_out is not None:
        json_out.write_bytes(render_json(runs, about))
    if html_out is not None:
        from simulator.page import render_html  # matplotlib is an extra, and takes half a second to import

        html_out.write_text(render_html(runs, about), encoding="utf-8")
    if len(runs) < len(plans) or not all(run.summary.complete for run in runs):
        raise typer.Exit(INTERRUPTED)


Plan = tuple[str, Variant]


def _run_all(console: Console, plans: Sequence[Plan], slo: Slo) -> list[Run]:
    """Ctrl-C keeps what is there: the run that was going on is marked as incomplete."""
    runs: list[Run] = []
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        tasks = [
            progress.add_task(f"{name} {varied.label}".strip(), total=len(varied.workload.requests), start=False)
            for name, varied in plans
        ]
        for task, (name, varied) in zip(tasks, plans, strict=True):
            progress.start_task(task)
            cluster = Cluster(varied.spec, varied.workload, name)
            complete = True
            try:
                cluster.run(lambda ended, _, task=task: progress.update(task, completed=ended))  # type: ignore[misc]
            except KeyboardInterrupt:
                complete = False
            progress.update(task, completed=len(varied.workload.requests) if complete else None)
            summary = summarise(cluster, name, slo, complete=complete)
            runs.append(Run(label=varied.label, summary=summary, series=series_of(cluster)))
            if not complete:
                break
    return runs


def _inject(console: Console, first: int, count: int) -> int:
    """A failure is said as soon as it is found; Ctrl-C ends the campaign with what it has shown until then."""
    from simulator.faults import run_seed

    failed: list[int] = []
    done = 0
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("faults", total=count)
        try:
            for failure in map(run_seed, range(first, first + count)):
                done += 1
                progress.update(task, completed=done)
                if failure is not None:
                    failed.append(failure.seed)
                    said = f"seed {failure.seed}, commit {source_commit()}: {failure.message}"
                    console.print(said, style="red", highlight=False)
        except KeyboardInterrupt:
            console.print(f"interrupted: {count - done} of {count} seeds were not run", highlight=False)
    console.print(f"{done - len(failed)} of {done} seeds kept every invariant", highlight=False)
    return 1 if failed else 0 if done == count else INTERRUPTED


def _in_words(instance: Instance, spec: ClusterSpec) -> str:
    counts = {"prefill": spec.prefill, "decode": spec.decode, "aggregated": spec.aggregated}
    instances = " + ".join(f"{count} {role}" for role, count in counts.items() if count)
    lower = "".join(f", {tier.tokens:,} in {tier.name}" for tier in spec.tiers)
    return (
        f"{instances} instances of {instance.model}, {instance.weights} weights and {instance.kv} K/V, on "
        f"{instance.accelerators} x {instance.node} each, {spec.kv_tokens:,} K/V tokens{lower}"
    )


def _variants(spec: ClusterSpec, workload: Workload, sweep: str) -> list[Variant]:
    """The workload and the cluster at each point of the sweep."""
    if not sweep:
        return [Variant("", workload, spec)]
    name, _, listed = sweep.partition("=")
    if name not in SWEEPS or not listed:
        raise ConfigError(f"--sweep {sweep!r}: NAME=V1,V2,... with NAME one of {', '.join(SWEEPS)}")
    try:
        values: list[Any] = [SWEEPS[name](value) for value in listed.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sweep {sweep!r}: {error}") from error
    if name == "rate":
        return [Variant(f"rate {value:g}x", sped_up(workload, value), spec) for value in values]
    return [Variant(f"{name} {value}", workload, msgspec.structs.replace(spec, **{name: value})) for value in values]
