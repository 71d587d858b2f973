"""ArchSpec from a Hugging Face config.json, with the older `rope_scaling` keys and with `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.arch import HF_ARCHITECTURES, ArchSpec, Family, LayerSpec, RopeSpec, check_spec, family_of
from engine.settings import Settings
from segue.errors import ConfigError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def spec_from_hf(config: Mapping[str, Any], source: str) -> ArchSpec:
    """Read a parsed config.json; ConfigError for an unknown architecture, a missing key or an unsupported feature."""
    settings = Settings(config, source)
    architectures = settings.get("architectures", [])
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"{source}: architectures is missing; known: {', '.join(sorted(HF_ARCHITECTURES))}")
    family = family_of(HF_ARCHITECTURES, str(architectures[0]), source)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", 256 if family.embed_scaled else hidden // heads)
    ropes, rope_of_kind = _ropes(settings, family)
    windows = _windows(settings, family)
    scalar = settings.number("query_pre_attn_scalar", head_dim if not family.embed_scaled else 256)
    bias = settings.flag("attention_bias", family.qkv_bias)
    return check_spec(
        ArchSpec(
            family=family.name,
            layers=tuple(LayerSpec(window=w, rope=rope_of_kind[w is not None]) for w in windows),
            ropes=ropes,
            hidden=hidden,
            intermediate=settings.integer("intermediate_size"),
            heads=heads,
            kv_heads=settings.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_rows=settings.integer("vocab_size"),
            max_position=settings.integer("max_position_embeddings"),
            norm_eps=settings.number("rms_norm_eps", 1e-6),
            attention_scale=1.0 / math.sqrt(scalar),
            activation=_activation(settings, family),
            tied=settings.flag("tie_word_embeddings", family.tied_default),
            qkv_bias=bias or family.qkv_bias,
            o_bias=bias and not family.qkv_bias,
            mlp_bias=settings.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            sandwich_norms=family.sandwich_norms,
            embed_scale=math.sqrt(hidden) if family.embed_scaled else 1.0,
            attention_soft_cap=settings.optional_number("attn_logit_softcapping"),
            logit_soft_cap=settings.optional_number("final_logit_softcapping"),
        ),
        source,
    )


def _activation(settings: Settings, family: Family) -> str:
    key = "hidden_activation" if family.embed_scaled else "hidden_act"
    name = settings.text(key, "gelu_pytorch_tanh" if family.embed_scaled else "silu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{settings.source}: {key} {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(settings: Settings, family: Family) -> list[int | None]:
    """Sliding window of every layer: `layer_types` where given, else the rule of the family."""
    layers = settings.integer("num_hidden_layers")
    if settings.get("sliding_window") is None or not settings.flag("use_sliding_window", family.name != "qwen2"):
        return [None] * layers
    if family.name in ("llama", "qwen3") and not settings.flag("use_sliding_window", False):
        return [None] * layers
    window = settings.integer("sliding_window")
    kinds = settings.get("layer_types")
    if kinds is None:
        return [window if _slides(settings, family, layer) else None for layer in range(layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise ConfigError(f"{settings.source}: layer_types must name {layers} sliding_attention or full_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _slides(settings: Settings, family: Family, layer: int) -> bool:
    if family.name == "gemma3":
        pattern = settings.integer("sliding_window_pattern", settings.integer("_sliding_window_pattern", 6))
        return (layer + 1) % pattern != 0
    if family.name == "gemma2":
        return layer % 2 == 0
    if family.name in ("qwen2", "qwen3"):
        return layer >= settings.integer("max_window_layers", 0)
    return True


def _ropes(settings: Settings, family: Family) -> tuple[tuple[RopeSpec, ...], tuple[int, int]]:
    """RoPE tables and the table index of (full, sliding) layers."""
    parameters: Any = settings.get("rope_parameters")
    if isinstance(parameters, dict) and "full_attention" in parameters:
        kinds: dict[str, Any] = parameters
        full = kinds["full_attention"]
        return (_rope(settings, full), _rope(settings, kinds.get("sliding_attention") or full)), (0, 1)
    scaling: Any = parameters if parameters is not None else settings.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise ConfigError(f"{settings.source}: rope_parameters must be an object")
    full = _rope(settings, scaling)
    if family.name != "gemma3":
        return (full,), (0, 0)
    return (full, RopeSpec(theta=settings.number("rope_local_base_freq", 10_000.0))), (0, 1)


def _rope(settings: Settings, scaling: Mapping[str, Any]) -> RopeSpec:
    values = Settings(scaling, f"{settings.source} (RoPE)")
    kind = values.text("rope_type", values.text("type", "default"))
    theta = values.number("rope_theta", settings.number("rope_theta", 10_000.0))
    if values.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{settings.source}: partial_rotary_factor other than 1 is not supported")
    original = values.integer("original_max_position_embeddings", settings.integer("max_position_embeddings"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "dynamic":
        return RopeSpec(theta=theta, kind="dynamic", factor=values.number("factor"))
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=values.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=values.number("factor"),
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
            original_max_position=original,
        )
    if kind == "yarn":
        return _yarn(values, theta, original)
    raise ConfigError(
        f"{settings.source}: rope_type {kind!r} is not supported; known: default, dynamic, linear, llama3, yarn"
    )


def _yarn(values: Settings, theta: float, original: int) -> RopeSpec:
    """YaRN (Peng et al. 2023): the attention factor defaults to 0.1 ln(factor) + 1, or a ratio of two such."""
    factor = values.number("factor")
    attention = values.optional_number("attention_factor")
    mscale, mscale_all = values.optional_number("mscale"), values.optional_number("mscale_all_dim")
    if attention is None:
        attention = yarn_scale(factor, 1.0)
        if mscale and mscale_all:
            attention = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=values.flag("truncate", True),
    )


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
