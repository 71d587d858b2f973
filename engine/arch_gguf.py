"""ArchSpec from GGUF metadata, whose keys are prefixed by the architecture's name."""

from __future__ import annotations

import math

from engine.arch import GGUF_ARCHITECTURES, ArchSpec, Family, LayerSpec, RopeSpec, check_spec, family_of
from engine.arch_hf import yarn_scale
from engine.settings import Settings
from engine.weights.gguf_file import ROPE_DIVISORS, GgufFile
from segue.errors import ConfigError

_GEMMA3_27B_LAYERS = 62
_GEMMA2_27B_LAYERS = 46
"""llama.cpp, too, tells the 27B models, which scale by hidden / heads, by their depth: the file has no key for it."""


class _Prefixed:
    """Look-ups of `<architecture>.<key>`."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.settings = Settings(file.metadata, str(file.path))
        self.prefix = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        return self.settings.integer(f"{self.prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.settings.number(f"{self.prefix}.{key}", default)

    def text(self, key: str, default: str) -> str:
        return self.settings.text(f"{self.prefix}.{key}", default)

    def optional_number(self, key: str) -> float | None:
        return self.settings.optional_number(f"{self.prefix}.{key}")


def gguf_family(file: GgufFile) -> Family:
    """The family row that the file names; ConfigError lists the known ones."""
    architecture = Settings(file.metadata, str(file.path)).text("general.architecture")
    return family_of(GGUF_ARCHITECTURES, architecture, str(file.path))


def spec_from_gguf(file: GgufFile) -> ArchSpec:
    """Read the metadata (and rope_freqs); ConfigError names a missing key."""
    source = str(file.path)
    family = gguf_family(file)
    values = _Prefixed(file, str(file.metadata["general.architecture"]))
    layers, hidden, heads = (
        values.integer("block_count"),
        values.integer("embedding_length"),
        values.integer("attention.head_count"),
    )
    head_dim = values.integer("attention.key_length", hidden // heads)
    _refuse_odd_heads(values, head_dim, source)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{source}: tensor token_embd.weight is missing")
    return check_spec(
        ArchSpec(
            family=family.name,
            layers=_layers(values, family, layers),
            ropes=_ropes(values, family, file),
            hidden=hidden,
            intermediate=values.integer("feed_forward_length"),
            heads=heads,
            kv_heads=values.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_rows=file.shape("token_embd.weight")[0],
            max_position=values.integer("context_length"),
            norm_eps=values.number("attention.layer_norm_rms_epsilon"),
            attention_scale=1.0 / math.sqrt(_query_scalar(family, layers, hidden, heads, head_dim)),
            activation=family.activation,
            tied="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm=family.qk_norm,
            sandwich_norms=family.sandwich_norms,
            embed_scale=math.sqrt(hidden) if family.embed_scaled else 1.0,
            attention_soft_cap=values.optional_number("attn_logit_softcapping"),
            logit_soft_cap=values.optional_number("final_logit_softcapping"),
        ),
        source,
    )


def _refuse_odd_heads(values: _Prefixed, head_dim: int, source: str) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.integer(key, head_dim) != head_dim:
            raise ConfigError(f"{source}: {values.prefix}.{key} other than the head's {head_dim} is not supported")


def _query_scalar(family: Family, layers: int, hidden: int, heads: int, head_dim: int) -> float:
    is_27b = (family.name, layers) in (("gemma3", _GEMMA3_27B_LAYERS), ("gemma2", _GEMMA2_27B_LAYERS))
    return hidden / heads if is_27b else head_dim


def _layers(values: _Prefixed, family: Family, layers: int) -> tuple[LayerSpec, ...]:
    window = values.integer("attention.sliding_window", 0)
    if not window:
        return (LayerSpec(),) * layers
    period = {"gemma3": 6, "gemma2": 2}.get(family.name, 0)
    sliding_rope = 1 if family.name == "gemma3" else 0
    return tuple(
        LayerSpec() if period and (layer + 1) % period == 0 else LayerSpec(window=window, rope=sliding_rope)
        for layer in range(layers)
    )


def _ropes(values: _Prefixed, family: Family, file: GgufFile) -> tuple[RopeSpec, ...]:
    full = _rope(values, file)
    if family.name != "gemma3":
        return (full,)
    return (full, RopeSpec(theta=values.number("rope.freq_base_swa", 10_000.0)))


def _rope(values: _Prefixed, file: GgufFile) -> RopeSpec:
    theta = values.number("rope.freq_base", 10_000.0)
    kind = values.text("rope.scaling.type", "none")
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(file.dequantized(ROPE_DIVISORS).tolist())
        return RopeSpec(theta=theta, frequency_divisors=divisors)
    if kind == "none":
        return RopeSpec(theta=theta)
    factor = values.number("rope.scaling.factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeSpec(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=values.integer("rope.scaling.original_context_length"),
            attention_factor=values.number("rope.scaling.attn_factor", 1.0) * yarn_scale(factor, 1.0),
        )
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; known: none, linear, yarn")
