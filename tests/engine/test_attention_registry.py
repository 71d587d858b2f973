"""Backend names are resolved by a pure rule over declared capabilities."""

import pytest
import torch

from engine.attention.base import AttentionCapabilities, AttentionShape
from engine.attention.registry import build_backend, resolve
from segue.errors import ConfigError

ANYWHERE = AttentionCapabilities(devices=("cpu", "cuda"), dtypes=(torch.float32, torch.bfloat16))
GPU_ONLY = AttentionCapabilities(
    devices=("cuda",), dtypes=(torch.bfloat16,), head_dims=(64, 128), soft_cap=False, block_sizes=(64,)
)
AVAILABLE = {"torch": ANYWHERE, "triton": GPU_ONLY}


def shape(**changes: object) -> AttentionShape:
    values = {
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "block_size": 64,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
    }
    return AttentionShape(**values | changes)


def test_auto_takes_the_fastest_that_can():
    assert resolve("auto", "decode", shape(), AVAILABLE) == "triton"


def test_auto_prefers_cudnn_for_prefill_alone():
    available = AVAILABLE | {"cudnn": GPU_ONLY}
    assert resolve("auto", "prefill", shape(), available) == "cudnn"
    assert resolve("auto", "decode", shape(), available) == "triton"


@pytest.mark.parametrize(
    "change",
    [
        {"device": torch.device("cpu")},
        {"dtype": torch.float32},
        {"head_dim": 96},
        {"soft_capped": True},
        {"block_size": 16},
    ],
)
def test_auto_falls_back_when_the_fastest_cannot(change):
    assert resolve("auto", "decode", shape(**change), AVAILABLE) == "torch"


def test_named_backend_that_cannot_says_why():
    with pytest.raises(ConfigError, match="attention_decode: triton cannot run this model: no head_dim 96"):
        resolve("triton", "decode", shape(head_dim=96), AVAILABLE)


def test_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"'flash'.*torch.*triton"):
        resolve("flash", "prefill", shape(), AVAILABLE)


def test_a_cpu_gets_the_torch_backend():
    built = build_backend("auto", "prefill", shape(device=torch.device("cpu"), dtype=torch.float32, block_size=16))
    assert built.name == "torch"
