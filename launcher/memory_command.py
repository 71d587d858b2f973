"""`segue memory`: what one instance will take of its device, before anything is allocated."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from launcher.options import OPTION_PATHS, check_model_path, cluster_config, parse_bytes
from segue.config import ClusterConfig
from segue.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(memory)


def memory(
    model: Annotated[str, typer.Option(help="Folder with config.json + safetensors, or a GGUF file.")],
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Plan for a GPU of this size that need not be here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="fp8: linear layers in fp8, on a GPU.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, or fp8 on a GPU.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt + generated tokens; 0: the model's own.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of one step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV page; 0: 16 on CPU, 64 on GPU.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pages, e.g. 2GiB; default: what is left.")] = None,
    kv_pages: Annotated[int | None, typer.Option(help="KV pages, counted; wins.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU; default 0.9.")] = None,
) -> None:
    """Say what an instance takes of its device, byte by byte, and how many tokens fit; exit 1 when it does not fit."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if name in OPTION_PATHS}
    console = Console()
    try:
        given["kv_memory"] = None if kv_memory is None else parse_bytes(kv_memory)
        check_model_path(model)
        asked = cluster_config(given, {}, source="command line")
        text, fits = ledger_text(asked, None if gpu_memory is None else parse_bytes(gpu_memory))
    except ConfigError as error:
        console.print(f"segue: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if fits else 1)


def ledger_text(config: ClusterConfig, gpu_bytes: int | None) -> tuple[str, bool]:
    """The ledger as text, and whether it fits. `gpu_bytes`: the memory of a GPU to plan for, here or not."""
    import torch  # takes seconds: not for a mistyped option

    from engine.engine import engine_shape, resolve_device
    from engine.memory import engine_ledger, gpu_capacity, read_capacity
    from engine.model_files import open_model
    from engine.parallel import Mesh

    model, engine = config.model, config.engine
    files = open_model(model.path, model.name, model.max_model_len)
    planned = gpu_bytes is not None and engine.device != "cpu"
    device = torch.device("cuda") if planned else resolve_device(engine.device, torch.cuda.is_available())
    shape = engine_shape(files, model, engine, config.scheduler, Mesh(), device)
    share = engine.gpu_memory_utilization
    capacity = gpu_capacity(gpu_bytes, share) if planned and gpu_bytes else read_capacity(device, share)
    ledger = engine_ledger(shape, capacity)
    return ledger.render(shape.max_model_len), ledger.fits
