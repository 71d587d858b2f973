"""How many KV pages fit: an explicit count, a byte budget, or what a GPU has left."""

from __future__ import annotations

import torch

from engine.arch import ArchSpec
from engine.parallel import Mesh, rank_shape
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.kv_layout import KvLayout

KV_BYTES_CPU = 1 << 30
"""Default pool on a CPU: 64k tokens of a 135M model in float32 are 1.5 GB, so a few long or many short requests."""

GPU_FREE_FRACTION = 0.9
"""Share of free GPU memory, after the weights, given to pages; the rest is activations and allocator slack."""


def parameter_bytes(spec: ArchSpec, dtype: torch.dtype, mesh: Mesh) -> int:
    """Weights of one rank; norms and biases are below a thousandth and left out."""
    shape = rank_shape(spec, mesh)
    attention = spec.hidden * spec.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * spec.hidden * shape.intermediate
    embeddings = spec.vocab_rows * spec.hidden * (1 if spec.tied else 2)
    return (len(spec.layers) * layer + embeddings) * dtype.itemsize


def pages_for(engine: EngineConfig, layout: KvLayout, device: torch.device, weights_bytes: int) -> int:
    """Pages of the pool; ConfigError when not one fits."""
    if engine.pages:
        return engine.pages
    budget = engine.kv_memory_bytes
    if not budget:
        budget = KV_BYTES_CPU if device.type == "cpu" else _gpu_budget_bytes(device, weights_bytes)
    pages = budget // layout.page_bytes
    if pages < 1:
        raise ConfigError(f"kv_memory_bytes: {budget} bytes hold no page of {layout.page_bytes} bytes")
    return pages


def _gpu_budget_bytes(device: torch.device, weights_bytes: int) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int((free_bytes - weights_bytes) * GPU_FREE_FRACTION)
