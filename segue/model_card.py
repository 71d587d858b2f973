"""What a front door must know about a model: how to make token ids of text, and the limits. No weights."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Made by the engine's loader, carried to gateways in a worker's registration.

    `tokenizer_json` is the text of a Hugging Face `tokenizer.json` (built from GGUF metadata where the model has none).
    `bos_ids` are prepended to plain-text prompts (not to token ids, and not when a chat template writes its own).
    `eos_ids` end generation unless `ignore_eos`. `vocab_size` counts real tokens: padded rows are never sampled.
    `digest` is the SHA-256 (hex) of all other fields' msgpack, and names the card in manifests.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    tokenizer_json: str
    chat_template: str | None
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    """Names used by chat templates: bos_token, eos_token, unk_token, pad_token."""
    digest: str = ""
