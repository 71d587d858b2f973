"""What a dense decoder looks like, as data. A new model of the family is a row of `FAMILIES`, not a new file.

`ArchSpec` is complete: the model, the loaders and the KV layout are built from it alone. It comes from a Hugging Face
`config.json` (`engine.arch_hf`) or from GGUF metadata (`engine.arch_gguf`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layer. "dynamic" (NTK by length) equals "default" up to the trained length, which
    is where `max_position` then ends: a base that grows with the length would invalidate cached K."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale)."""
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()
    """One per rotated pair, where the checkpoint carries them as a tensor (GGUF's rope_freqs); empty: none."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None: all."""
    rope: int = 0
    """Index into ArchSpec.ropes."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What the architecture's name implies and its configuration file does not say."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    """Norms after attention and after the MLP as well as before them (Gemma 2 and 3)."""
    norm_offset: float = 0.0
    """Hugging Face stores w of (1 + w) for Gemma; GGUF stores 1 + w."""
    embed_scaled: bool = False
    """Embeddings are multiplied by sqrt(hidden), rounded to the model's dtype."""
    tied_default: bool = False
    activation: str = "silu"
    gguf_permuted: bool = False
    """llama.cpp stores Q and K rows of this architecture permuted for its interleaved RoPE."""


class ArchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model's shape. Sizes are of the whole model, not of a rank's shard."""

    family: str
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_rows: int
    """Rows of the embedding; the tokenizer may use fewer, the rest are never sampled."""
    max_position: int
    norm_eps: float
    attention_scale: float
    activation: str
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    @property
    def windowed(self) -> bool:
        return any(layer.window is not None for layer in self.layers)


LLAMA = Family(name="llama", gguf_permuted=True)
MISTRAL = Family(name="mistral", gguf_permuted=True)
QWEN2 = Family(name="qwen2", qkv_bias=True)
QWEN3 = Family(name="qwen3", qk_norm=True)
GEMMA2 = Family(
    name="gemma2",
    sandwich_norms=True,
    norm_offset=1.0,
    embed_scaled=True,
    tied_default=True,
    activation="gelu_tanh",
)
GEMMA3 = Family(
    name="gemma3",
    qk_norm=True,
    sandwich_norms=True,
    norm_offset=1.0,
    embed_scaled=True,
    tied_default=True,
    activation="gelu_tanh",
)

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)}

HF_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
"""config.json's `architectures[0]` -> family."""

GGUF_ARCHITECTURES: dict[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
"""`general.architecture` -> family (Mistral's files say "llama")."""


def family_of(table: dict[str, str], architecture: str, source: str) -> Family:
    """The family row behind an architecture's name; ConfigError lists the known names."""
    if architecture not in table:
        raise ConfigError(f"{source}: unknown architecture {architecture!r}; known: {', '.join(sorted(table))}")
    return FAMILIES[table[architecture]]


def check_spec(spec: ArchSpec, source: str) -> ArchSpec:
    """Refuse shapes that the model could not compute; returns `spec`."""
    problems = (
        (spec.heads % spec.kv_heads != 0, f"{spec.heads} heads are not a multiple of {spec.kv_heads} kv-heads"),
        (spec.head_dim % 2 != 0, f"head_dim {spec.head_dim} is odd"),
        (spec.activation not in ("silu", "gelu_tanh", "gelu"), f"activation {spec.activation!r} is not supported"),
        (not spec.layers, "no layers"),
        (spec.max_position < 1, f"maximum position {spec.max_position}"),
    )
    for failed, problem in problems:
        if failed:
            raise ConfigError(f"{source}: {problem}")
    return spec
