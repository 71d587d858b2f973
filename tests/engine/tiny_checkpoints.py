"""Small random models of every family, written by transformers, and their reference logits."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 263
"""256 bytes, some specials, and padded rows in between: an odd number."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def family_configs() -> dict[str, PretrainedConfig]:
    return {
        "llama": LlamaConfig(**SIZES),
        "llama_tied_biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "llama_llama3_rope": LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3_ROPE)),
        "llama_linear_rope": LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
        ),
        "llama_yarn_rope": LlamaConfig(**SIZES, rope_parameters=dict(YARN_ROPE)),
        "mistral_window": MistralConfig(**SIZES, sliding_window=9),
        "qwen2": Qwen2Config(**SIZES | {"head_dim": 10}),
        "qwen2_window": Qwen2Config(
            **SIZES | {"head_dim": 10}, use_sliding_window=True, sliding_window=7, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**SIZES),
        "gemma2": Gemma2Config(
            **SIZES,
            sliding_window=11,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=4.0,
        ),
        "gemma3": Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7},
            sliding_window=10,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        ),
    }


def write_checkpoint(config: PretrainedConfig, directory: Path, **save_options: object) -> AutoModelForCausalLM:
    """A random model in float32 at `directory`, with a byte-level tokenizer; returns the reference."""
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.normal_(mean=0.0 if "bias" in name else 0.7, std=0.3)
    model.save_pretrained(directory, **save_options)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return model


def byte_tokenizer() -> Tokenizer:
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def reference_logits(model: AutoModelForCausalLM, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).abs().max() / reference.abs().max()).item()
