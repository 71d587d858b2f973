"""Models with random weights, from a shape and a seed: all that a benchmark or a GPU test needs of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.arch import ArchSpec, LayerSpec, RopeSpec
from engine.engine import ModelInfo, dtype_name
from engine.model_files import ModelFiles
from engine.parallel import Mesh
from engine.parameters import ModelParameters, placements
from segue.block_hash import chain_root
from segue.kv_layout import KvLayout
from segue.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class RandomFiles(ModelFiles):
    """Stands in for a checkpoint. Weights are normal with variance 1 / fan-in, norms are near one. Numbers are drawn in
    float32 whatever the dtype, so that two dtypes hold the same model up to rounding."""

    seed: int = 0
    generate_on: str = "cpu"
    """Device of the generator: numbers differ between devices, so comparisons across devices use "cpu"."""

    def load(self, parameters: ModelParameters, mesh: Mesh) -> None:
        generator = torch.Generator(self.generate_on).manual_seed(self.seed)
        for placement in placements(self.spec, parameters, mesh):
            shape, target = placement.target.shape, placement.target
            values = torch.empty(shape, dtype=torch.float32, device=self.generate_on)
            if placement.kind.endswith("norm"):
                values.uniform_(0.5, 1.5, generator=generator)
            else:
                values.normal_(0.0, shape[-1] ** -0.5, generator=generator)
            target.copy_(values)


def random_model(
    spec: ArchSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    pages_total: int,
    max_model_len: int,
    seed: int = 0,
    eos_ids: tuple[int, ...] = (),
    vocab_size: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> ModelInfo:
    """What `read_model` would give for a checkpoint of this shape; for `load_engine(..., info=...)`."""
    layout = KvLayout(
        layers=len(spec.layers),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype_name(kv_dtype or dtype),
    )
    card = ModelCard(
        name="random",
        architecture=spec.family,
        vocab_size=vocab_size or spec.vocab_rows,
        max_model_len=max_model_len,
        tokenizer_json="",
        chat_template=None,
        eos_ids=eos_ids,
    )
    large = device.type == "cuda" and spec.hidden >= 1024
    digest = chain_root({"seed": seed, "spec": msgspec.msgpack.encode(spec)})
    files = RandomFiles(
        Path(),
        None,
        spec,
        card,
        dtype_name(dtype),
        digest,
        seed=seed,
        generate_on=str(device) if large else "cpu",
    )
    return ModelInfo(files, card, spec, layout, digest, device, dtype, pages_total)


def llama_spec(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab_rows: int,
    theta: float = 500_000.0,
    max_position: int = 131_072,
) -> ArchSpec:
    """A plain llama of these sizes."""
    return ArchSpec(
        family="llama",
        layers=(LayerSpec(),) * layers,
        ropes=(RopeSpec(theta=theta),),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_rows=vocab_rows,
        max_position=max_position,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        activation="silu",
        tied=False,
    )


def llama_8b_spec() -> ArchSpec:
    """Llama-3.1-8B's shape (its rotary scaling aside, which costs nothing)."""
    return llama_spec(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab_rows=128_256
    )
