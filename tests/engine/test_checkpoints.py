"""Checkpoint faults are configuration errors that name the tensor, key or file; identities change with contents."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_driver import driver_for
from test_gguf_tokenizer import sentencepiece_metadata
from tiny_checkpoints import family_configs, reference_logits, relative_error, write_checkpoint

from engine.arch_hf import spec_from_hf
from engine.engine import build_model, read_model
from engine.weights.digest import file_digest
from engine.weights.gguf_file import GgufFile
from segue.config import EngineConfig, ModelConfig
from segue.errors import ConfigError
from segue.plan import Chunk

CONFIG = EngineConfig(device="cpu", block_size=4, pages=1)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_checkpoint(family_configs()["llama"], tmp_path)
    return tmp_path


def load(path: Path) -> None:
    build_model(read_model(ModelConfig(path=str(path)), CONFIG), CONFIG, positions_max=8)


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_missing_tensor_is_named(llama):
    edit_weights(llama, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(llama)


def test_surplus_tensor_is_named(llama):
    edit_weights(llama, **{"model.layers.9.extra": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"surplus tensor model\.layers\.9\.extra"):
        load(llama)


def test_misshapen_tensor_is_named_with_both_shapes(llama):
    edit_weights(llama, **{"model.norm.weight": torch.zeros(61)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(61,\), expected \(60,\)"):
        load(llama)


def test_missing_shard_is_named(tmp_path):
    write_checkpoint(family_configs()["llama"], tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_half_copied_weights_are_named_with_their_size(llama, kept):
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*\({kept} bytes"):
        load(llama)


def test_unknown_architecture_lists_the_known(llama):
    edit_config(llama, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*Gemma3ForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load(llama)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "60"}, "hidden_size must be an integer"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_bad_config_names_the_key(llama, changes, message):
    edit_config(llama, **changes)
    with pytest.raises(ConfigError, match=message):
        load(llama)


@pytest.mark.parametrize(
    "model,engine,message",
    [
        ({"dtype": "int8"}, {}, "dtype 'int8'"),
        ({"max_model_len": 129}, {}, "max_model_len 129"),
        ({}, {"device": "tpu"}, "device 'tpu'"),
        ({}, {"attention_decode": "flash9"}, "flash9.*torch"),
        ({}, {"pages": 0, "kv_memory_bytes": 10}, "kv_memory_bytes"),
    ],
)
def test_bad_option_is_named(llama, model, engine, message):
    config = EngineConfig(**{"device": "cpu", "pages": 1} | engine)
    with pytest.raises(ConfigError, match=message):
        build_model(read_model(ModelConfig(path=str(llama), **model), config), config, positions_max=8)


def test_missing_path_and_tokenizer_are_named(llama):
    with pytest.raises(ConfigError, match="does not exist"):
        read_model(str(llama / "nowhere"), CONFIG)
    (llama / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        read_model(str(llama), CONFIG)


def test_old_and_new_rope_keys_mean_the_same():
    base = json.loads(family_configs()["llama"].to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    new = base | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    old = base | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}
    del old["rope_parameters"]
    assert spec_from_hf(new, "new") == spec_from_hf(old, "old")


def test_old_gemma3_keys_mean_the_same():
    base = json.loads(family_configs()["gemma3"].to_json_string()) | {"architectures": ["Gemma3ForCausalLM"]}
    kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = base | {"rope_parameters": kinds}
    old = {key: value for key, value in base.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert spec_from_hf(new, "new") == spec_from_hf(old | {"sliding_window_pattern": 6}, "old")


def test_eos_ids_come_from_every_file(llama):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 256]}))
    assert read_model(str(llama), CONFIG).card.eos_ids == (3, 256)


def test_chat_template_and_special_tokens_are_in_the_card(llama):
    config = {"chat_template": "{{ bos_token }}x", "bos_token": {"content": "<s>"}, "eos_token": "<end>"}
    (llama / "tokenizer_config.json").write_text(json.dumps(config))
    card = read_model(str(llama), CONFIG).card
    assert card.chat_template == "{{ bos_token }}x"
    assert card.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}


def test_kv_root_changes_with_what_makes_blocks_exchangeable(llama):
    def root(**options: object) -> bytes:
        return read_model(str(llama), EngineConfig(**{"device": "cpu", "pages": 1, "block_size": 4} | options)).kv_root

    original = root()
    assert root(pages=9) == original
    assert len({original, root(block_size=8), root(kv_dtype="bfloat16")}) == 3
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert root() != original
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    assert root() == original
    edit_weights(llama, **{"model.norm.weight": torch.ones(60)})
    assert root() != original


def test_digest_is_remembered_until_the_file_changes(tmp_path):
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"one")
    first = file_digest(file, cache)
    status = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digest(file, cache) == first, "same path, size and time: taken from the cache"
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_digest(file, cache) != first


def write_gguf(path: Path, model, architecture: str, *, skip: str = "") -> None:
    """A transformers model as GGUF, with Q and K permuted for the llama architecture as llama.cpp does."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in sentencepiece_metadata(prefix=True).values.items():
        name = key.removeprefix("tokenizer.ggml.")
        if name == "model":
            writer.add_tokenizer_model(value)
        elif name == "tokens":
            writer.add_token_list(value)
        elif name == "scores":
            writer.add_token_scores(value)
        elif name == "token_type":
            writer.add_token_types(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target != skip:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_config(family: str):
    """GGUF has no key for Gemma 3's rope scaling, local theta or pattern: the values that the format implies."""
    config = family_configs()[family]
    if family == "gemma3":
        default = {"rope_type": "default", "rope_theta": 10_000.0}
        config.rope_parameters = {"full_attention": default, "sliding_attention": default}
        config.query_pre_attn_scalar = config.head_dim
    return config


@pytest.mark.parametrize(
    "family,architecture", [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3")]
)
def test_gguf_gives_the_logits_of_the_model_it_was_made_from(tmp_path, family, architecture):
    config = gguf_config(family)
    if family == "qwen2":
        config.head_dim = 10
    model = write_checkpoint(config, tmp_path)
    write_gguf(tmp_path / "m.gguf", model, architecture)
    driver = driver_for(str(tmp_path / "m.gguf"))
    tokens = list(range(40, 75))
    driver.start(0, tokens)
    ours = driver.logits([Chunk(0, 0, len(tokens), False)])
    assert relative_error(ours, reference_logits(model, tokens)) <= 1e-4


def test_gguf_without_a_tensor_names_it(tmp_path):
    write_gguf(
        tmp_path / "m.gguf", write_checkpoint(family_configs()["llama"], tmp_path), "llama", skip="blk.2.ffn_up.weight"
    )
    with pytest.raises(ConfigError, match=r"blk\.2\.ffn_up\.weight is missing"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("damage", ["magic", "version", "header", "data"])
def test_damaged_gguf_is_refused(tmp_path, damage):
    path = tmp_path / "m.gguf"
    write_gguf(path, write_checkpoint(family_configs()["llama"], tmp_path), "llama")
    raw = bytearray(path.read_bytes())
    if damage == "magic":
        raw[:4] = b"GGML"
    elif damage == "version":
        raw[4] = 1
    path.write_bytes(raw[: {"header": 300, "data": len(raw) - 64}.get(damage, len(raw))])
    with pytest.raises(ConfigError, match=str(path)):
        GgufFile(path)
