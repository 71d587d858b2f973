"""A small random Llama with a byte-level tokenizer, saved as a model folder, and its transformers reference."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MAX_MODEL_LEN = 512


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every text and every token sequence has a counterpart."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def write_toy_model(folder: Path) -> LlamaForCausalLM:
    """Odd on purpose: 3 query heads per KV head, head_dim 24 beside hidden 84, vocabulary not a power of two."""
    tokenizer = byte_tokenizer()
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=84,
        intermediate_size=136,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        initializer_range=0.15,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def worst_gap(model: torch.nn.Module, prompt: list[int], generated: list[int]) -> float:
    """How far, in logits, the reference prefers another token than the generated one, at the worst position.

    0 means that greedy decoding with the reference gives the same tokens. One forward pass over prompt + generated
    checks every position, also those behind a harmless tie.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())
