"""The engine as a worker sees it: read a model, allocate or adopt KV pages, execute batch plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.arch import ArchSpec
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.registry import build_backend
from engine.batch_invariant.mode import attention, check_batch_invariant, cpu_layer_ops, numerics
from engine.batch_invariant.weights import fix_products
from engine.fp8 import check_fp8, quantize
from engine.layer_ops import LayerOps, TorchOps
from engine.memory import EngineShape, checked_pages, read_capacity
from engine.model import DecoderModel
from engine.model_files import ModelFiles, kv_root, open_model
from engine.parallel import Collectives, Mesh, rank_shape
from engine.parameters import allocate
from engine.row_state import RowState
from engine.runner import Runner
from engine.sampling_state import SamplingState
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.errors import ConfigError
from segue.kv_layout import KvLayout
from segue.model_card import ModelCard
from segue.plan import BatchPlan, PlanResult

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
BLOCK_SIZE_CPU, BLOCK_SIZE_GPU = 16, 64


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Everything about a model that is known before weights are loaded and pages allocated."""

    files: ModelFiles
    card: ModelCard
    spec: ArchSpec
    layout: KvLayout
    kv_root: bytes
    device: torch.device
    dtype: torch.dtype
    pages_total: int
    numerics: str = ""
    """Of a batch-invariant engine: what the bits of its results depend on; empty for another."""

    @property
    def pages_bytes(self) -> int:
        """Size of the page buffer that `load_engine` accepts."""
        return self.pages_total * self.layout.page_bytes


class PlanRunner(Protocol):
    """Executes plans: `Runner`, or on a GPU one that replays graphs for decode steps."""

    def launch(self, plan: BatchPlan) -> None: ...

    def collect(self) -> PlanResult: ...


class Engine:
    """One model on one device. One thread calls `launch` and `collect`; `pages` may be read and written by a KV mover
    where the planner's page ownership allows it."""

    def __init__(self, info: ModelInfo, pages: torch.Tensor, runner: PlanRunner) -> None:
        self.info = info
        self.card = info.card
        self.layout = info.layout
        self.kv_root = info.kv_root
        self.numerics = info.numerics
        self.pages_total = info.pages_total
        self.pages = pages
        """[pages, layers, 2, kv_heads, block, dim] of the KV dtype."""
        self._runner: PlanRunner | None = runner

    def launch(self, plan: BatchPlan) -> None:
        self._running().launch(plan)

    def collect(self) -> PlanResult:
        """Results come in launch order."""
        return self._running().collect()

    def close(self) -> None:
        """Wait for the device and drop weights and pages; the page buffer is not touched afterwards. Idempotent."""
        if self._runner is not None and self.info.device.type == "cuda":
            torch.cuda.synchronize(self.info.device)
        self._runner = None
        self.pages = torch.empty(0)

    def _running(self) -> PlanRunner:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner


def read_model(
    model: ModelConfig | str,
    engine: EngineConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    mesh: Mesh | None = None,
) -> ModelInfo:
    """Read headers, tokenizer and digests, resolve every "auto". ConfigError names the option or file at fault."""
    model = ModelConfig(path=model) if isinstance(model, str) else model
    engine, scheduler, mesh = engine or EngineConfig(), scheduler or SchedulerConfig(), mesh or Mesh()
    files = open_model(model.path, model.name, model.max_model_len)
    device = resolve_device(engine.device, torch.cuda.is_available())
    shape = engine_shape(files, model, engine, scheduler, mesh, device)
    own = ""
    if engine.batch_invariant:
        check_batch_invariant(model, engine, mesh, device)
        own = numerics(device, shape.dtype, engine.threads)
    return ModelInfo(
        files=files,
        card=files.card,
        spec=files.spec,
        layout=shape.layout,
        kv_root=kv_root(files, dtype_name(shape.dtype) + model.quantization, shape.layout, own),
        device=device,
        dtype=shape.dtype,
        pages_total=checked_pages(shape, read_capacity(device, engine.gpu_memory_utilization)),
        numerics=own,
    )


def engine_shape(
    files: ModelFiles,
    model: ModelConfig,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    mesh: Mesh,
    device: torch.device,
) -> EngineShape:
    """What decides how much memory an engine on `device` takes, every "auto" resolved; ConfigError names the option."""
    dtype = resolve_dtype(model.dtype, device, files.stored_dtype, "dtype")
    kv_dtype = dtype if engine.kv_dtype == "auto" else resolve_kv_dtype(engine.kv_dtype, device)
    if model.quantization:
        check_fp8(model.quantization, dtype, device, allocate(files.spec, dtype, torch.device("meta"), mesh).layers[0])
    layout = KvLayout(
        layers=len(files.spec.layers),
        kv_heads=rank_shape(files.spec, mesh).kv_heads,
        head_dim=files.spec.head_dim,
        block_size=engine.block_size or (BLOCK_SIZE_CPU if device.type == "cpu" else BLOCK_SIZE_GPU),
        dtype=dtype_name(kv_dtype),
    )
    card = files.card
    return EngineShape(
        spec=files.spec,
        dtype=dtype,
        layout=layout,
        device=device,
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        engine=engine,
        scheduler=scheduler,
        mesh=mesh,
        quantized=bool(model.quantization),
    )


def load_engine(
    model: ModelConfig,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    *,
    page_buffer: memoryview | None = None,
    pages_trailer_bytes: int = 0,
    info: ModelInfo | None = None,
    mesh: Mesh | None = None,
    collectives: Collectives | None = None,
) -> Engine:
    """Load weights and build the runner. `page_buffer` (CPU only, writable, `pages_bytes` long) becomes the KV pool;
    without one the pool is allocated, with `pages_trailer_bytes` spare bytes behind it. `info`: from an earlier
    `read_model` of the same configuration."""
    info = info or read_model(model, engine, scheduler, mesh)
    if engine.threads and info.device.type == "cpu":
        torch.set_num_threads(engine.threads)
    state = RowState(
        scheduler.max_num_seqs,
        info.card.max_model_len + scheduler.pipeline_depth + scheduler.steps_max,
        info.layout.block_size,
        info.device,
    )
    sampling = SamplingState(
        scheduler.max_num_seqs, info.card.vocab_size, info.spec.vocab_rows, info.card.eos_ids, info.device
    )
    built = build_model(
        info,
        engine,
        positions_max=state.tokens.shape[1],
        quantization=model.quantization,
        mesh=mesh,
        collectives=collectives,
    )
    pages = _pages(info, page_buffer, pages_trailer_bytes)
    eager = Runner(built, pages, state, sampling, sample_apart=engine.batch_invariant)
    runner: PlanRunner = eager
    if info.device.type == "cuda":
        runner = graph_runner(eager, built, state, pages, info, scheduler, enabled=engine.uses_graphs)
    return Engine(info, pages, runner)


def build_model(
    info: ModelInfo,
    engine: EngineConfig,
    *,
    positions_max: int,
    quantization: str = "",
    mesh: Mesh | None = None,
    collectives: Collectives | None = None,
) -> DecoderModel:
    """Allocate and fill parameters, choose attention backends."""
    mesh = mesh or Mesh()
    parameters = allocate(info.spec, info.dtype, info.device, mesh)
    with torch.inference_mode():
        info.files.load(parameters, mesh)
        if quantization:
            check_fp8(quantization, info.dtype, info.device, parameters.layers[0])
            quantize(parameters)
            torch.cuda.empty_cache()  # what the weights were read into goes to the pages
        if engine.batch_invariant:
            fix_products(parameters)
    prefill, decode = attention_backends(info, engine, mesh)
    return DecoderModel(
        info.spec,
        parameters,
        prefill,
        decode,
        layer_ops(info.device, batch_invariant=engine.batch_invariant),
        positions_max=positions_max,
        mesh=mesh,
        collectives=collectives,
    )


def attention_backends(info: ModelInfo, engine: EngineConfig, mesh: Mesh) -> tuple[AttentionBackend, AttentionBackend]:
    """For chunks and for decodes."""
    heads = rank_shape(info.spec, mesh)
    shape = AttentionShape(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=info.spec.head_dim,
        block_size=info.layout.block_size,
        dtype=info.dtype,
        device=info.device,
        windowed=info.spec.windowed,
        soft_capped=info.spec.attention_soft_cap is not None,
    )
    if engine.batch_invariant:
        both = attention(shape)
        return both, both
    prefill = build_backend(prefill_backend(engine.attention_prefill, info.layout.dtype), "prefill", shape)
    return prefill, build_backend(engine.attention_decode, "decode", shape)


def prefill_backend(name: str, kv_dtype: str) -> str:
    """fp8 pages are read by the Triton kernels alone; ConfigError for another backend that was asked for."""
    if kv_dtype != "float8_e4m3fn":
        return name
    if name not in ("auto", "triton"):
        raise ConfigError(f"attention_prefill {name!r} cannot read fp8 K/V; triton can")
    return "triton"


def layer_ops(device: torch.device, *, batch_invariant: bool = False) -> LayerOps:
    """Fused kernels on a GPU, which know no neighbours. Imported here: a CPU engine needs no triton."""
    if device.type != "cuda":
        return cpu_layer_ops() if batch_invariant else TorchOps()
    from segue_kernels.programmatic_launch import supports_pdl

    from engine.cuda.layer_ops import FusedOps

    return FusedOps(pdl=supports_pdl(device))


def graph_runner(
    eager: Runner,
    model: DecoderModel,
    state: RowState,
    pages: torch.Tensor,
    info: ModelInfo,
    scheduler: SchedulerConfig,
    *,
    enabled: bool,
) -> PlanRunner:
    """Graphs for decode steps and small chunks; `eager` itself where they are off or the model cannot be captured."""
    from engine.cuda import assemble

    if not enabled or not assemble.can_capture(model):
        return eager
    return assemble.graph_runner(
        eager,
        model,
        state,
        pages,
        info.card.vocab_size,
        chunk_tokens_max=scheduler.max_num_batched_tokens,
        capture=True,
    )


def _pages(info: ModelInfo, page_buffer: memoryview | None, trailer_bytes: int) -> torch.Tensor:
    shape = (info.pages_total, *info.layout.page_shape)
    dtype = KV_DTYPES[info.layout.dtype]
    if page_buffer is None:
        memory = torch.zeros(info.pages_bytes + trailer_bytes, dtype=torch.uint8, device=info.device)
        return memory[: info.pages_bytes].view(dtype).view(shape)
    if info.device.type != "cpu":
        raise ConfigError(f"a page buffer in host memory cannot hold the pages of {info.device}")
    if page_buffer.nbytes != info.pages_bytes or page_buffer.readonly:
        raise ConfigError(f"page buffer of {page_buffer.nbytes} bytes; writable {info.pages_bytes} bytes are needed")
    return torch.frombuffer(page_buffer, dtype=dtype).view(shape)


def resolve_device(name: str, has_cuda: bool) -> torch.device:
    """ "auto" is cuda when there is one. ConfigError for an unknown or absent device."""
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: known: auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and not has_cuda:
        raise ConfigError(f"device {name!r}: torch finds no CUDA device")
    return device


def resolve_dtype(name: str, device: torch.device, stored: str, option: str) -> torch.dtype:
    """ "auto" is float32 on a CPU, the checkpoint's own on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored
    if name not in DTYPES:
        raise ConfigError(f"{option} {name!r} is not supported; known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_kv_dtype(name: str, device: torch.device) -> torch.dtype:
    """fp8 is e4m3, unscaled: keys and values are of order one, and it reaches from 0.002 to 448."""
    if name not in ("fp8", "float8_e4m3fn"):
        return resolve_dtype(name, device, "", "kv_dtype")
    if device.type != "cuda":
        raise ConfigError(f"kv_dtype {name!r} needs a GPU; known here: auto, {', '.join(DTYPES)}")
    return torch.float8_e4m3fn


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in KV_DTYPES.items() if value == dtype)
