"""The ledger of an engine that is not there yet, and what a start does with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.arch import ArchSpec, LayerSpec, RopeSpec
from engine.memory import Capacity, EngineShape, checked_pages, engine_ledger, gpu_capacity, parameter_bytes
from engine.memory_ledger import activation_bytes
from engine.parallel import Mesh, rank_shape
from segue.config import EngineConfig, SchedulerConfig
from segue.errors import ConfigError
from segue.kv_layout import KvLayout

GIB = 1 << 30
LLAMA_8B = ArchSpec(
    family="llama",
    layers=(LayerSpec(),) * 32,
    ropes=(RopeSpec(theta=500_000.0),),
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_rows=128_256,
    max_position=131_072,
    norm_eps=1e-5,
    attention_scale=128**-0.5,
    activation="silu",
    tied=False,
)
LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")


def shape_of(device: str = "cuda", engine: EngineConfig | None = None, **scheduler: int) -> EngineShape:
    return EngineShape(
        spec=LLAMA_8B,
        dtype=torch.bfloat16,
        layout=LAYOUT,
        device=torch.device(device),
        vocab_size=128_256,
        max_model_len=8192,
        engine=engine or EngineConfig(),
        scheduler=SchedulerConfig(**{"max_num_seqs": 256, "max_num_batched_tokens": 8192} | scheduler),
        mesh=Mesh(),
    )


def test_weights_are_counted_to_the_byte() -> None:
    """8,030,261,248 parameters, of which 65 norms of 4096 are float32."""
    assert parameter_bytes(LLAMA_8B, torch.bfloat16, Mesh()) == 2 * 8_030_261_248 + 2 * 65 * 4096
    tied = _replaced(tied=True)
    untied_bytes = parameter_bytes(LLAMA_8B, torch.bfloat16, Mesh())
    assert untied_bytes - parameter_bytes(tied, torch.bfloat16, Mesh()) == 2 * 128_256 * 4096


def test_pages_get_what_is_left_and_no_more() -> None:
    ledger = engine_ledger(shape_of(), Capacity(120 * GIB, ""))
    left = ledger.capacity_bytes - ledger.bytes_taken
    assert ledger.fits and 0 <= left < LAYOUT.page_bytes
    assert ledger.tokens == ledger.pages * 64 > 700_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_line_of_the_ledger_is_in_its_text(device: str) -> None:
    ledger = engine_ledger(shape_of(device), Capacity(200 * GIB, "all of it"))
    text = ledger.render(8192)
    for line in ledger.lines:
        assert line.bytes_taken > 0
        assert f"{line.name} " in text
    assert "all of it" in text and f"{ledger.tokens // 8192:,} sequences" in text


def test_longer_steps_and_more_rows_leave_fewer_pages() -> None:
    pages = [
        engine_ledger(shape_of(**scheduler), Capacity(40 * GIB, "")).pages
        for scheduler in ({}, {"max_num_batched_tokens": 16_384}, {"max_num_seqs": 512})
    ]
    assert pages[0] > pages[1] and pages[0] > pages[2]


def test_an_engine_that_does_not_fit_is_refused_with_the_ledger() -> None:
    with pytest.raises(ConfigError, match=r"(?s)does not fit.*weights +15,3.*KV pages"):
        checked_pages(shape_of(), Capacity(16 * GIB, ""))
    asked = shape_of(engine=EngineConfig(pages=100_000))
    with pytest.raises(ConfigError, match="100000 pages"):
        checked_pages(asked, Capacity(120 * GIB, ""))


def test_asked_for_pages_are_given() -> None:
    assert checked_pages(shape_of(engine=EngineConfig(pages=77)), Capacity(120 * GIB, "")) == 77
    budget = shape_of(engine=EngineConfig(kv_memory_bytes=GIB))
    assert checked_pages(budget, Capacity(120 * GIB, "")) == GIB // LAYOUT.page_bytes


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        gpu_capacity(GIB, share)


def test_activations_grow_with_the_widest_place() -> None:
    mine = rank_shape(LLAMA_8B, Mesh())
    assert activation_bytes(LLAMA_8B, mine, 1, 2) == 2 * (3 * 4096 + 3 * 14336) + 24 + 512
    narrow = dataclasses.replace(mine, intermediate=64)
    assert activation_bytes(LLAMA_8B, narrow, 1, 2) == 2 * (3 * 4096 + 6144 + 2 * 4096) + 24 + 512


def _replaced(**changes: object) -> ArchSpec:
    return ArchSpec(**{name: getattr(LLAMA_8B, name) for name in LLAMA_8B.__struct_fields__} | changes)
