"""The ledger against what torch's allocator and the driver count, for an engine that has run its largest steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from engine.cuda.random_model import llama_spec, random_model
from engine.engine import load_engine
from engine.memory import EngineShape, engine_ledger, gpu_capacity
from engine.parallel import Mesh
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
"""Both engines compile every kernel and capture every graph of 64 rows and 8,192 tokens: with a cold kernel cache an
H200 machine of 16 cores was not through in a minute."""

MIB = 1 << 20
ROWS, BUDGET, BLOCK, LENGTH = 64, 8192, 64, 16_384


@pytest.fixture
def unused_driver_bytes(device: torch.device) -> Iterator[int]:
    """What the driver counts before there is an engine: context and libraries of earlier tests, but not the blocks that
    torch keeps of them."""
    gc.collect()
    torch.cuda.empty_cache()
    yield _used()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("steps", ["greedy", "filtered"])
def test_an_engine_takes_what_its_ledger_says(device: torch.device, unused_driver_bytes: int, steps: str) -> None:
    spec = llama_spec(layers=4, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab_rows=128_256)
    scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, pipeline_depth=1)
    pages = 2048
    info = random_model(
        spec, dtype=torch.bfloat16, device=device, block_size=BLOCK, pages_total=pages, max_model_len=LENGTH
    )
    config = EngineConfig(device="cuda", pages=pages)
    shape = EngineShape(spec, torch.bfloat16, info.layout, device, spec.vocab_rows, LENGTH, config, scheduler, Mesh())
    ledger = engine_ledger(shape, gpu_capacity(140 << 30, 0.9))
    engine = load_engine(ModelConfig(path="random"), config, scheduler, info=info)
    torch.cuda.reset_peak_memory_stats()
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    if steps == "filtered":
        sampling = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.1, max_tokens=4)
    prompts = [list(range(100, 100 + BUDGET)), *[[5] * 127] * (ROWS - 1)]
    starts = [RowStart(row, row, prompt, len(prompt), 0, _pages(row), sampling) for row, prompt in enumerate(prompts)]
    plans = [BatchPlan(op=1, starts=starts, chunks=[Chunk(0, 0, BUDGET, True)])]
    plans.append(BatchPlan(op=2, chunks=[Chunk(row, 0, 127, True) for row in range(1, ROWS)], decodes=[0]))
    plans.append(BatchPlan(op=3, decodes=list(range(ROWS))))
    for plan in plans:
        engine.launch(plan)
        engine.collect()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    taken = _used() - unused_driver_bytes
    outside = taken - reserved
    lines = {line.name: line.bytes_taken / MIB for line in ledger.lines}
    planned = ledger.bytes_taken - (lines["libraries"] - 96) * MIB
    print(
        f"\n{ledger.render(LENGTH)}\nplanned for torch {planned / MIB:.0f} MiB, allocated at most "
        f"{allocated / MIB:.0f}, reserved {reserved / MIB:.0f}; outside torch {outside / MIB:.0f} of "
        f"{lines['libraries'] - 96:.0f} planned"
    )
    engine.close()
    assert 0.9 * planned <= reserved <= 1.02 * planned
    assert taken <= 1.02 * ledger.bytes_taken


def _pages(row: int) -> list[int]:
    """Row 0 owns the first 130 pages, each other row three."""
    return list(range(130)) if row == 0 else list(range(130 + 3 * row, 133 + 3 * row))


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
