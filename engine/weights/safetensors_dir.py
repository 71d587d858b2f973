"""Hugging Face directories: model.safetensors, or shards listed by model.safetensors.index.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.arch import ArchSpec
from segue.errors import ConfigError

_LAYER_NAMES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "attention_norm": "input_layernorm.weight",
}
_PLAIN_NORMS = {"mlp_norm": "post_attention_layernorm.weight"}
_SANDWICH_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_MODEL_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


class SafetensorsReader:
    """Reads one tensor at a time through safetensors' memory maps, which live as long as the reader."""

    def __init__(self, directory: Path, spec: ArchSpec) -> None:
        self.source = str(directory)
        self._tied = spec.tied
        self._sandwich_norms = spec.sandwich_norms
        files: list[Any] = [_open(path) for path in weight_files(directory)]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._check_index(directory)

    def _check_index(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        if index.exists() and not (directory / "model.safetensors").exists():
            for name in json.loads(index.read_text())["weight_map"]:
                if name not in self._file_of:
                    raise ConfigError(f"{self.source}: tensor {name} is in the index and in no shard")

    def tensor_name(self, kind: str, layer: int) -> str:
        return hugging_face_name(kind, layer, sandwich_norms=self._sandwich_norms)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self._file_of.items()
            if not name.endswith("rotary_emb.inv_freq") and not (self._tied and name == "lm_head.weight")
        }

    def read(self, name: str, kind: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ConfigError(f"{path}: not a readable safetensors file ({size} bytes; half copied?): {error}") from error


def hugging_face_name(kind: str, layer: int, *, sandwich_norms: bool) -> str:
    """Name of a Placement's tensor in a Hugging Face checkpoint."""
    if kind in _MODEL_NAMES:
        return _MODEL_NAMES[kind]
    names = _LAYER_NAMES | (_SANDWICH_NORMS if sandwich_norms else _PLAIN_NORMS)
    return f"model.layers.{layer}.{names[kind]}"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory in name order; ConfigError when there are none or a shard is gone."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(f"{directory}: neither {single.name} nor {index.name} is there")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index}: not a safetensors index: {error}") from error
    for name in names:
        if not (directory / name).exists():
            raise ConfigError(f"{directory}: shard {name} is missing")
    return [directory / name for name in names]
