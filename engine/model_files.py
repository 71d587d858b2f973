"""A model on disk, read as far as possible without its weights: what to compute, how to tokenise, what to allocate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.arch import FAMILIES, ArchSpec
from engine.arch_gguf import gguf_family, spec_from_gguf
from engine.arch_hf import spec_from_hf
from engine.parallel import Mesh
from engine.parameters import ModelParameters, placements
from engine.settings import Settings
from engine.tokenizer import card_from_directory, card_from_gguf, read_json
from engine.weights.base import CheckpointReader, fill
from engine.weights.digest import weights_digest
from engine.weights.gguf_file import GgufFile, GgufReader
from engine.weights.safetensors_dir import SafetensorsReader, weight_files
from segue.block_hash import chain_root
from segue.errors import ConfigError
from segue.kv_layout import KvLayout
from segue.model_card import ModelCard

KV_FORMAT_VERSION = 1
"""Raised when the same weights and tokens would give other K/V bytes than before."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened checkpoint: its shape, card and identity."""

    path: Path
    gguf: GgufFile | None
    spec: ArchSpec
    card: ModelCard
    stored_dtype: str
    """What "auto" means on a GPU."""
    weights_digest: bytes

    def load(self, parameters: ModelParameters, mesh: Mesh) -> None:
        """Fill allocated parameters tensor by tensor; ConfigError names a missing, surplus or misshapen tensor."""
        family = FAMILIES[self.spec.family]
        reader: CheckpointReader
        if self.gguf is None:
            reader, offset = SafetensorsReader(self.path, self.spec), family.norm_offset
        else:
            permuted = gguf_family(self.gguf).gguf_permuted
            heads, kv_heads = self.spec.heads, self.spec.kv_heads
            reader, offset = GgufReader(self.gguf, permuted=permuted, heads=heads, kv_heads=kv_heads), 0.0
        fill(reader, placements(self.spec, parameters, mesh), offset)


def open_model(path_text: str, name: str, max_model_len: int) -> ModelFiles:
    """Open a GGUF file or a Hugging Face directory. `max_model_len` 0 means the model's own maximum; ConfigError when
    it is larger, or when the files are not a supported model."""
    path = Path(path_text).expanduser()
    if not path.exists():
        raise ConfigError(f"model path {path} does not exist")
    return _open_gguf(path, name, max_model_len) if path.is_file() else _open_directory(path, name, max_model_len)


def _open_gguf(path: Path, name: str, max_model_len: int) -> ModelFiles:
    file = GgufFile(path)
    spec = spec_from_gguf(file)
    card = card_from_gguf(
        Settings(file.metadata, str(path)),
        name=name or path.stem,
        architecture=spec.family,
        vocab_rows=spec.vocab_rows,
        max_model_len=checked_length(max_model_len, spec, str(path)),
    )
    return ModelFiles(path, file, spec, card, "bfloat16", weights_digest([path]))


def _open_directory(path: Path, name: str, max_model_len: int) -> ModelFiles:
    config_path = path / "config.json"
    config = read_json(config_path)
    if not config:
        raise ConfigError(f"{config_path} is missing")
    spec = spec_from_hf(config, str(config_path))
    card = card_from_directory(
        path,
        name=name or path.resolve().name,
        architecture=spec.family,
        vocab_rows=spec.vocab_rows,
        max_model_len=checked_length(max_model_len, spec, str(config_path)),
    )
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return ModelFiles(path, None, spec, card, stored, weights_digest(weight_files(path)))


def checked_length(max_model_len: int, spec: ArchSpec, source: str) -> int:
    if max_model_len < 0 or max_model_len > spec.max_position:
        raise ConfigError(f"max_model_len {max_model_len}: {source} allows 1 to {spec.max_position}")
    return max_model_len or spec.max_position


def kv_root(files: ModelFiles, dtype: str, layout: KvLayout, numerics: str = "") -> bytes:
    """Root (32 bytes) of block-hash chains: equal roots mean that equal tokens have exchangeable K/V. `numerics`: what
    else the bits depend on, where they are promised."""
    promised = {"numerics": numerics} if numerics else {}
    return chain_root(
        promised
        | {
            "format": KV_FORMAT_VERSION,
            "weights": files.weights_digest,
            "tokenizer": hashlib.sha256(files.card.tokenizer_json.encode()).digest(),
            "dtype": dtype,
            "kv_dtype": layout.dtype,
            "attention": hashlib.sha256(msgspec.msgpack.encode(files.spec)).digest(),
            "block_size": layout.block_size,
        }
    )
