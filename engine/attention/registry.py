"""Backends by name, imported when chosen. `resolve` turns "auto" into a name by a pure rule."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Literal

from engine.attention.base import AttentionBackend, AttentionCapabilities, AttentionShape
from segue.errors import ConfigError

BACKENDS: dict[str, str] = {
    "torch": "engine.attention.torch_backend:TorchBackend",
    "triton": "engine.attention.triton_backend:TritonBackend",
    "cudnn": "engine.attention.cudnn_backend:CudnnBackend",
}

Phase = Literal["prefill", "decode"]

AUTO_ORDER: dict[Phase, tuple[str, ...]] = {"prefill": ("cudnn", "triton", "torch"), "decode": ("triton", "torch")}
"""Fastest first; "auto" takes the first that can run the shape. "cudnn" itself leaves short chunks to Triton."""


def refusal(capabilities: AttentionCapabilities, shape: AttentionShape, phase: Phase) -> str | None:
    """Why a backend cannot run `phase` of `shape`, or None when it can."""
    checks = (
        (phase == "prefill" and not capabilities.prefill, "no prefill"),
        (phase == "decode" and not capabilities.decode, "no decode"),
        (shape.device.type not in capabilities.devices, f"no {shape.device.type}"),
        (shape.dtype not in capabilities.dtypes, f"no {shape.dtype}"),
        (shape.windowed and not capabilities.window, "no sliding window"),
        (shape.soft_capped and not capabilities.soft_cap, "no soft cap"),
        (
            bool(capabilities.head_dims) and shape.head_dim not in capabilities.head_dims,
            f"no head_dim {shape.head_dim}",
        ),
        (
            bool(capabilities.block_sizes) and shape.block_size not in capabilities.block_sizes,
            f"no block_size {shape.block_size}",
        ),
    )
    return next((reason for failed, reason in checks if failed), None)


def resolve(name: str, phase: Phase, shape: AttentionShape, available: Mapping[str, AttentionCapabilities]) -> str:
    """The backend's name for a configured name or "auto"; ConfigError when unknown or unable."""
    if name == "auto":
        for candidate in AUTO_ORDER[phase]:
            if candidate in available and refusal(available[candidate], shape, phase) is None:
                return candidate
        raise ConfigError(f"attention_{phase}: no backend of {sorted(available)} can run {shape}")
    if name not in available:
        raise ConfigError(f"attention_{phase}: unknown backend {name!r}; known: {', '.join(sorted(BACKENDS))}")
    reason = refusal(available[name], shape, phase)
    if reason is not None:
        raise ConfigError(f"attention_{phase}: {name} cannot run this model: {reason}")
    return name


def load_backend_class(name: str) -> type[AttentionBackend]:
    """Import the class behind a registry name."""
    module_name, _, attribute = BACKENDS[name].partition(":")
    loaded: type[AttentionBackend] = getattr(importlib.import_module(module_name), attribute)
    return loaded


def build_backend(name: str, phase: Phase, shape: AttentionShape) -> AttentionBackend:
    """Resolve `name` among the backends that this device could use, and construct it."""
    candidates = [name] if name in BACKENDS else [n for n in BACKENDS if shape.device.type == "cuda" or n == "torch"]
    available = {candidate: load_backend_class(candidate).capabilities for candidate in candidates}
    chosen = resolve(name, phase, shape, available)
    return load_backend_class(chosen)(shape)  # type: ignore[call-arg]
