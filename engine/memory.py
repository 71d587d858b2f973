"""How much memory there is, what an engine of given shape takes of it, and how many KV pages that leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.arch import ArchSpec
from engine.fp8 import QUANTISED
from engine.memory_ledger import LedgerLine, MemoryLedger, activation_bytes, logits_bytes, plan_ledger
from engine.parallel import Mesh, rank_shape
from engine.parameters import ModelParameters, allocate
from segue.config import EngineConfig, SchedulerConfig
from segue.errors import ConfigError
from segue.kv_layout import KvLayout

KV_BYTES_CPU = 1 << 30
"""Default pool on a CPU: 64k tokens of a 135M model in float32 are 1.5 GB, so a few long or many short requests."""

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

SAMPLING_COPIES = 4
"""Of all sampled rows' logits in float32: raw, shaped, scaled and noise, when the eager sampler has to do it all."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one engine may take on a device, and how that was found."""

    bytes_max: int
    note: str


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Everything that decides how much memory an engine takes."""

    spec: ArchSpec
    dtype: torch.dtype
    layout: KvLayout
    device: torch.device
    vocab_size: int
    max_model_len: int
    engine: EngineConfig
    scheduler: SchedulerConfig
    mesh: Mesh
    quantized: bool = False
    """Linear layers in fp8."""

    @property
    def positions_max(self) -> int:
        """Columns of the token table and rows of the rotary tables."""
        return self.max_model_len + self.scheduler.pipeline_depth + self.scheduler.steps_max


def engine_ledger(shape: EngineShape, capacity: Capacity) -> MemoryLedger:
    """The ledger of an engine that is not there yet. Whether it `fits` is the caller's to judge."""
    engine = shape.engine
    default_budget = KV_BYTES_CPU if shape.device.type == "cpu" else 0
    return plan_ledger(
        device=str(shape.device),
        capacity_bytes=capacity.bytes_max,
        capacity_note=capacity.note,
        lines=(*_lasting(shape), *_passing(shape)),
        page_bytes=shape.layout.page_bytes,
        block_size=shape.layout.block_size,
        pages_asked=engine.pages,
        page_budget_bytes=engine.kv_memory_bytes or default_budget,
    )


def checked_pages(shape: EngineShape, capacity: Capacity) -> int:
    """Pages of the pool; ConfigError with the ledger when it does not fit."""
    ledger, budget = engine_ledger(shape, capacity), shape.engine.kv_memory_bytes
    if budget and not ledger.pages:
        raise ConfigError(f"kv_memory_bytes: {budget} bytes hold no page of {ledger.page_bytes} bytes")
    if not ledger.fits:
        raise ConfigError(f"the engine does not fit its memory\n{ledger.render(shape.max_model_len)}")
    return ledger.pages


def read_capacity(device: torch.device, utilization: float) -> Capacity:
    """`utilization` is a share of all of a GPU's memory, so that engines on one GPU can divide it; a CPU engine may
    take what is available. ConfigError when others hold the GPU's memory already."""
    if device.type == "cpu":
        return Capacity(_host_bytes(), "memory available now")
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    capacity = gpu_capacity(total_bytes, utilization)
    if capacity.bytes_max > free_bytes:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g}: that is {capacity.bytes_max >> 20} MiB of {device}, of which "
            f"only {free_bytes >> 20} MiB are free"
        )
    return capacity


def gpu_capacity(total_bytes: int, utilization: float) -> Capacity:
    """ConfigError for a share that is none."""
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization {utilization:g}: it must be above 0 and at most 1")
    return Capacity(int(total_bytes * utilization), f"{utilization:g} of {total_bytes >> 20} MiB")


def _host_bytes() -> int:
    """Available memory, or what the container's limit leaves of it."""
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _lasting(shape: EngineShape) -> list[LedgerLine]:
    """Tensors that live as long as the engine, counted exactly."""
    spec, rows = shape.spec, shape.scheduler.max_num_seqs
    blocks_max = -(-shape.positions_max // shape.layout.block_size)
    ropes = len(spec.ropes) * shape.positions_max * spec.head_dim * 4
    lines = [
        _weights(shape),
        LedgerLine("rotary tables", ropes, f"{shape.positions_max} positions"),
        LedgerLine("row tables", rows * (shape.positions_max * 8 + blocks_max * 4), f"{rows} rows"),
    ]
    if shape.device.type == "cuda":
        from engine.cuda import footprint  # needs triton, which a CPU engine does without

        lines += footprint.lasting(shape.spec, shape.scheduler, shape.vocab_size, blocks_max, shape.dtype)
    return lines


def _weights(shape: EngineShape) -> LedgerLine:
    """fp8: a byte for each element and four for each output channel of a quantised layer; the rest in the dtype."""
    taken, name = parameter_bytes(shape.spec, shape.dtype, shape.mesh), f"{shape.dtype}".removeprefix("torch.")
    if not shape.quantized:
        return LedgerLine("weights", taken, name)
    layers = allocate(shape.spec, shape.dtype, torch.device("meta"), shape.mesh).layers
    linears = [getattr(layer, field) for layer in layers for field in QUANTISED]
    saved = sum(weight.nbytes - weight.numel() - 4 * weight.shape[0] for weight in linears)
    return LedgerLine("weights", taken - saved, f"linear layers fp8, the rest {name}")


def _passing(shape: EngineShape) -> list[LedgerLine]:
    """What steps need for a moment."""
    spec, scheduler, mine = shape.spec, shape.scheduler, rank_shape(shape.spec, shape.mesh)
    item_bytes = shape.dtype.itemsize
    tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    sampled = min(scheduler.max_num_seqs, tokens)
    logits = logits_bytes(spec, sampled, item_bytes, SAMPLING_COPIES)
    lines = [
        LedgerLine("activations", activation_bytes(spec, mine, tokens, item_bytes), f"a step of {tokens} tokens"),
        LedgerLine("logits", logits, f"{sampled} rows"),
    ]
    if shape.device.type == "cuda":
        from engine.cuda import footprint

        step_bytes = sum(line.bytes_taken for line in lines)
        lines += footprint.passing(
            spec, mine, scheduler, shape.max_model_len, shape.engine.uses_graphs, shape.dtype, step_bytes
        )
        if shape.engine.batch_invariant:
            splits = footprint.split_bytes(spec, mine, shape.dtype)
            lines.append(LedgerLine("attention splits", splits, "batch-invariant"))
    return lines


def parameter_bytes(spec: ArchSpec, dtype: torch.dtype, mesh: Mesh) -> int:
    """Weights, norms and biases of one rank."""
    parameters = allocate(spec, dtype, torch.device("meta"), mesh)
    return tensor_bytes(parameters)


def tensor_bytes(parameters: ModelParameters) -> int:
    """Each tensor once, also where head and embedding are the same."""
    layers = [getattr(layer, name) for layer in parameters.layers for name in layer.__dataclass_fields__]
    tensors = [parameters.embed, parameters.final_norm, *layers]
    if parameters.lm_head is not parameters.embed:
        tensors.append(parameters.lm_head)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
