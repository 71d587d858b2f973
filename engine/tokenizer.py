"""ModelCard: the tokenizer, chat template and limits of a model, from a model directory or from GGUF metadata."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.settings import Settings
from engine.tokenizer_gguf import tokenizer_from_gguf
from segue.errors import ConfigError
from segue.model_card import ModelCard

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GGUF_TURN_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def card_digest(card: ModelCard) -> str:
    """SHA-256 (hex) of every field but the digest."""
    fields = msgspec.structs.asdict(card)
    del fields["digest"]
    return hashlib.sha256(msgspec.msgpack.encode(fields, order="deterministic")).hexdigest()


def card_from_gguf(
    settings: Settings, *, name: str, architecture: str, vocab_rows: int, max_model_len: int
) -> ModelCard:
    tokenizer = tokenizer_from_gguf(settings)
    tokens: list[str] = settings.get("tokenizer.ggml.tokens")
    ids = {key: settings.get(f"tokenizer.ggml.{stem}_token_id") for key, stem in _GGUF_TOKEN_KEYS.items()}
    ends = [ids["eos_token"]] + [settings.get(key) for key in _GGUF_TURN_ENDS]
    default_bos = settings.text("tokenizer.ggml.model") == "llama"
    writes_bos = settings.flag("tokenizer.ggml.add_bos_token", default_bos) and ids["bos_token"] is not None
    return _finish(
        name=name,
        architecture=architecture,
        vocab_rows=vocab_rows,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        chat_template=settings.get("tokenizer.chat_template"),
        bos_ids=(ids["bos_token"],) if writes_bos else (),
        eos_ids=tuple(sorted({end for end in ends if end is not None})),
        special_tokens={key: tokens[index] for key, index in ids.items() if index is not None},
    )


def card_from_directory(
    directory: Path, *, name: str, architecture: str, vocab_rows: int, max_model_len: int
) -> ModelCard:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{directory}: tokenizer.json is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{path}: {error}") from error
    config = read_json(directory / "tokenizer_config.json")
    special = {key: _token_text(config[key]) for key in _TEMPLATE_TOKENS if config.get(key)}
    return _finish(
        name=name,
        architecture=architecture,
        vocab_rows=vocab_rows,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, config),
        bos_ids=_bos_ids(tokenizer),
        eos_ids=_eos_ids(directory, tokenizer, special),
        special_tokens=special,
    )


def _finish(*, tokenizer: Tokenizer, vocab_rows: int, **fields: Any) -> ModelCard:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    card = ModelCard(vocab_size=min(largest + 1, vocab_rows), tokenizer_json=tokenizer.to_str(), **fields)
    return msgspec.structs.replace(card, digest=card_digest(card))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is absent; ConfigError when it is not one."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` wins over tokenizer_config.json, whose value may be a list of named templates."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return None if template is None else str(template)


def _bos_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer's own post-processor puts before plain text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    starts = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next(start for start in starts if whole[start : start + len(plain)] == plain)])


def _eos_ids(directory: Path, tokenizer: Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """generation_config.json and config.json may each name one id or several; the tokenizer's EOS counts too."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(directory / file).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if "eos_token" in special:
        index = tokenizer.token_to_id(special["eos_token"])
        found.update([] if index is None else [index])
    return tuple(sorted(found))
