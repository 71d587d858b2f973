"""The `segue` command."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench_client import command as bench_command
from launcher import client_commands, doctor, explain, memory_command, plan, simulate
from launcher.option_values import ATTENTION_BACKENDS
from launcher.options import (
    check_model_path,
    cluster_config,
    parse_bytes,
    parse_slo,
    parse_weights,
    read_config_file,
)
from launcher.progress import Progress
from launcher.up import run_up, sweep
from segue.errors import ConfigError

ATTENTION_HELP = f"Attention backend: {', '.join(ATTENTION_BACKENDS)}."

app = typer.Typer(
    help="Segue: a disaggregated prefill/decode serving cluster.", no_args_is_help=True, pretty_exceptions_enable=False
)
client_commands.register(app)
explain.register(app)
simulate.register(app)
plan.register(app)
memory_command.register(app)
bench_command.register(app)


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Folder with config.json + safetensors, or a GGUF file.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a .toml or .json file; options win.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API; default: from the path.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="fp8: linear layers in fp8, on a GPU.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, or fp8 on a GPU.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt + generated tokens; 0: the model's own.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of one step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV page; 0: 16 on CPU, 64 on GPU.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pages of each instance, e.g. 2GiB.")] = None,
    kv_pages: Annotated[int | None, typer.Option(help="KV pages of each instance, counted; wins.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU that its instances may take together; default 0.9.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill instances; default 1.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode instances; default 1.")] = None,
    aggregated: Annotated[
        int | None, typer.Option(help="Instances that do both; alone, they replace the pair.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per instance; 0: cores / instances.")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Default on.")
    ] = None,
    pipeline_depth: Annotated[int | None, typer.Option(help="Steps planned ahead of the running one: 0 or 1.")] = None,
    steps_max: Annotated[int | None, typer.Option(help="Decode steps in one plan.")] = None,
    kv_connector: Annotated[str | None, typer.Option(help="How K/V moves: auto, shared_memory, tcp, cuda_ipc.")] = None,
    batch_invariant: Annotated[
        bool | None, typer.Option("--batch-invariant", help="Results have the same bits in every batch; slower.")
    ] = None,
    attention_prefill: Annotated[str | None, typer.Option(help=ATTENTION_HELP)] = None,
    attention_decode: Annotated[str | None, typer.Option(help=ATTENTION_HELP)] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; default 127.0.0.1.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Default 50051; 0: any free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Default 8000; 0: any free one.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Where workers and clients reach the front.")] = None,
    queue_max: Annotated[int | None, typer.Option(help="Requests that may wait for an instance.")] = None,
    conductors: Annotated[
        int | None, typer.Option(help="Conductor + gateway processes, each on the next ports; several need Redis.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Directory that Conductors share, e.g. redis://127.0.0.1:6379; default: embedded."),
    ] = None,
    tenant_requests: Annotated[int | None, typer.Option(help="Live requests of each tenant; 0: no limit.")] = None,
    tenant_tokens: Annotated[int | None, typer.Option(help="Tokens of each tenant per minute; 0: no limit.")] = None,
    strict_fields: Annotated[bool | None, typer.Option(help="Reject unknown fields of the OpenAI API.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="Objectives in seconds, e.g. ttft=2,tpot=0.05: reject what would miss them.")
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(help="JSON made by benchmarks/fit_cost_model.py; default: learned while serving.")
    ] = None,
    tenant_weight: Annotated[
        list[str] | None, typer.Option(help="TENANT=WEIGHT of GPU time; may be given several times; default 1.")
    ] = None,
    tenant_queue_max: Annotated[int | None, typer.Option(help="Requests of one tenant that may wait.")] = None,
    record: Annotated[str | None, typer.Option(help="File for what the Conductor is told and decides.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    local_processes: Annotated[
        bool | None, typer.Option("--local-processes", help="Plain processes instead of Ray actors.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the processes' logs here.")] = None,
) -> None:
    """Run a cluster in the foreground; Ctrl-C stops it and leaves nothing behind."""
    given: dict[str, Any] = dict(locals())
    for own in ("config", "log_dir", "slo", "tenant_weight"):
        del given[own]
    progress = Progress(Console())
    sweep(progress)
    try:
        given["kv_memory"] = None if kv_memory is None else parse_bytes(kv_memory)
        given["tenant_weights"] = parse_weights(tenant_weight) if tenant_weight else None
        given |= parse_slo(slo) if slo else {}
        from_file = {} if config is None else read_config_file(config)
        asked = cluster_config(given, from_file, source=str(config or "command line"))
        check_model_path(asked.model.path)
        status = run_up(asked, progress, log_dir)
    except ConfigError as error:
        progress.say(f"segue: {error}")
        raise typer.Exit(2) from error
    raise typer.Exit(status)


@app.command("doctor")
def doctor_command(
    grpc_port: Annotated[int, typer.Option(help="gRPC port that `segue up` is to use.")] = 50051,
    http_port: Annotated[int, typer.Option(help="HTTP port that `segue up` is to use.")] = 8000,
) -> None:
    """Check this machine: ports, Python, packages, disk, shared memory, limits, GPU; each with the remedy."""
    findings = doctor.examine({"--grpc-port": grpc_port, "--http-port": http_port})
    console = Console()
    for finding in findings:
        console.print(doctor.render(finding), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(finding.level == doctor.Level.FAIL for finding in findings) else 0)


@app.command()
def version() -> None:
    """Print Segue's version."""
    typer.echo(importlib.metadata.version("segue"))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
