"""When an engine can be batch-invariant, and whose results are comparable with its own."""

from __future__ import annotations

import hashlib

import torch

from engine.attention.base import AttentionBackend, AttentionShape
from engine.batch_invariant.row_blocks import REFERENCES, library_product
from engine.layer_ops import LayerOps
from engine.parallel import Mesh
from segue.config import EngineConfig, ModelConfig
from segue.errors import ConfigError

PROBE_IN, PROBE_OUT = 512, 96

BACKENDS = {"cpu": "torch", "cuda": "triton"}


def check_batch_invariant(model: ModelConfig, engine: EngineConfig, mesh: Mesh, device: torch.device) -> None:
    """ConfigError that names the option with which no bits can be promised, and what to do."""
    backend = BACKENDS[device.type]
    for option, name in (
        ("attention_prefill", engine.attention_prefill),
        ("attention_decode", engine.attention_decode),
    ):
        if name not in ("auto", backend):
            raise ConfigError(f"batch_invariant: {option} {name!r} depends on the batch; {backend} does not")
    if model.quantization:
        raise ConfigError(f"batch_invariant: products of quantization {model.quantization!r} depend on the batch")
    if mesh.size > 1:
        raise ConfigError(f"batch_invariant: sums over {mesh.size} ranks depend on the size of the step; use one rank")


def numerics(device: torch.device, dtype: torch.dtype, threads: int) -> str:
    """What the bits of results depend on beside the model: engines that agree in it agree in bits. `threads` 0: torch's
    own choice."""
    name = f"{dtype}".removeprefix("torch.")
    if device.type == "cpu":
        threads = threads or torch.get_num_threads()
        kind = torch.backends.cpu.get_cpu_capability()
        return f"cpu {kind}, torch {torch.__version__}, {name}, {threads} threads, {_fingerprint(dtype)}"
    import triton

    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}, {name}"


def _fingerprint(dtype: torch.dtype) -> str:
    """Of the bits that the library's products have here, for each number of rows that may serve as reference:
    processors of one capability may be given different kernels."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, PROBE_IN, generator=generator).to(dtype) for rows in (max(REFERENCES), PROBE_OUT))
    digest = hashlib.sha256()
    for rows in REFERENCES:
        digest.update(library_product(x[:rows].clone(), weight).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def attention(shape: AttentionShape) -> AttentionBackend:
    """For chunks and decodes alike: both must be computed in the same way."""
    if shape.device.type == "cpu":
        from engine.batch_invariant.torch_attention import AlignedTorchAttention

        return AlignedTorchAttention(shape)
    from engine.batch_invariant.triton_attention import AlignedTritonAttention

    backend: AttentionBackend = AlignedTritonAttention(shape)
    return backend


def cpu_layer_ops() -> LayerOps:
    from engine.batch_invariant.layer_ops import RowwiseOps

    return RowwiseOps()
