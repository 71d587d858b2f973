"""What a start says about fp8 where it cannot be had, and what the ledger says where it can."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_memory import LLAMA_8B, shape_of
from tiny_checkpoints import family_configs, write_checkpoint

from engine.engine import prefill_backend, read_model, resolve_kv_dtype
from engine.fp8 import check_fp8
from engine.memory import Capacity, engine_ledger
from engine.parallel import Mesh
from engine.parameters import allocate
from segue.config import EngineConfig, ModelConfig
from segue.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantization": "int4"}, "int4.*known: none, fp8"), ({"quantization": "fp8"}, "capability 9.0")],
)
def test_quantization_that_cannot_be_had_is_refused_before_weights_are_read(tmp_path, options, message):
    write_checkpoint(family_configs()["llama"], tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_model(ModelConfig(path=str(tmp_path), **options), EngineConfig(device="cpu", pages=1))


def test_fp8_pages_need_a_gpu():
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolve_kv_dtype("fp8", CPU)
    assert resolve_kv_dtype("fp8", CUDA) is torch.float8_e4m3fn
    assert resolve_kv_dtype("bfloat16", CUDA) is torch.bfloat16


def test_fp8_pages_are_read_by_triton_alone():
    assert prefill_backend("auto", "float8_e4m3fn") == "triton"
    assert prefill_backend("auto", "bfloat16") == "auto"
    with pytest.raises(ConfigError, match=r"cudnn.*triton can"):
        prefill_backend("cudnn", "float8_e4m3fn")


def test_shapes_that_tiles_do_not_divide_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="dtype bfloat16, not float16"):
        check_fp8("fp8", torch.float16, CUDA, None)
    spec = LLAMA_8B
    layer = allocate(spec, torch.bfloat16, torch.device("meta"), Mesh()).layers[0]
    check_fp8("fp8", torch.bfloat16, CUDA, layer)
    layer.down = torch.empty(4096, 14337, device="meta")
    with pytest.raises(ConfigError, match="down of 4096 x 14337"):
        check_fp8("fp8", torch.bfloat16, CUDA, layer)


def test_the_ledger_counts_a_byte_for_each_quantised_weight():
    plain, quantized = (
        engine_ledger(dataclasses.replace(shape_of(), quantized=quantized), Capacity(120 << 30, ""))
        .lines[0]
        .bytes_taken
        for quantized in (False, True)
    )
    linear_weights = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    assert plain - quantized == linear_weights - 4 * 32 * (6144 + 4096 + 2 * 14336 + 4096)
