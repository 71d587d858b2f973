"""fp8 weights and pages on a GPU: near the bfloat16 model's logits, the same through graphs as without."""

from __future__ import annotations

import pytest
import torch

from engine.cuda.random_model import llama_spec, random_model
from engine.engine import ModelInfo, build_model, load_engine
from engine.fp8 import fp8_weight
from engine.row_state import RowState
from engine.step_batch import build_step
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SPEC = llama_spec(layers=3, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=1024, vocab_rows=2048)
FP8 = torch.float8_e4m3fn


def info_of(device: torch.device, kv_dtype: torch.dtype | None) -> ModelInfo:
    return random_model(
        SPEC, dtype=torch.bfloat16, device=device, block_size=16, pages_total=64, max_model_len=256, kv_dtype=kv_dtype
    )


def logits_of(device: torch.device, quantization: str, kv_dtype: torch.dtype | None) -> torch.Tensor:
    """Of a chunk on a cached chunk, and of a decode."""
    info = info_of(device, kv_dtype)
    model = build_model(info, EngineConfig(), positions_max=256, quantization=quantization)
    pages = torch.zeros(64, *info.layout.page_shape, dtype=kv_dtype or torch.bfloat16, device=device)
    state = RowState(2, 256, 16, device)
    state.start(0, 1, list(range(20, 120)), list(range(8)))
    with torch.inference_mode():
        steps = [build_step(state, [Chunk(0, first, 50, False)], []) for first in (0, 49)]
        parts = [model.forward(step.model_input, pages) for step in steps]
        parts.append(model.forward(build_step(state, [], [0]).model_input, pages))
    return torch.cat(parts).float()


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "error_max"), [("fp8", None, 0.25), ("", FP8, 0.12), ("fp8", FP8, 0.25)]
)
def test_logits_are_near_those_of_bfloat16(
    device: torch.device, quantization: str, kv_dtype: torch.dtype | None, error_max: float
) -> None:
    exact = logits_of(device, "", None)
    error = (logits_of(device, quantization, kv_dtype) - exact).norm() / exact.norm()
    print(f"relative error {float(error):.4f}")
    assert 0 < error < error_max


def test_products_of_fp8_equal_those_of_the_numbers_they_stand_for(device: torch.device) -> None:
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((33, 256), (528, 256)))
    quantized = fp8_weight(weight)
    again = quantized.values.float() * quantized.scales.t()
    rows = fp8_weight(x)
    expected = (rows.values.float() * rows.scales.t()) @ again.T
    error = (quantized.product(x).float() - expected).norm() / expected.norm()
    assert error < 5e-3


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_in_fp8_runs_chunks_copies_and_decodes(device: torch.device, graphs: bool) -> None:
    info = info_of(device, FP8)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    engine = load_engine(
        ModelConfig(path="random", quantization="fp8"), EngineConfig(cuda_graphs=graphs), scheduler, info=info
    )
    start = RowStart(0, 1, list(range(20, 60)), 40, 0, list(range(8)), SamplingParams(temperature=0.0))
    plans = [
        BatchPlan(op=1, starts=[start], chunks=[Chunk(0, 0, 40, True)]),
        BatchPlan(op=2, copies=[(0, 20), (1, 21)], decodes=[0], steps_max=5),
    ]
    tokens = []
    for plan in plans:
        engine.launch(plan)
        tokens += engine.collect().rows[0].tokens
    assert len(tokens) == 6
    assert torch.equal(engine.pages[20].view(torch.uint8), engine.pages[0].view(torch.uint8))
    engine.close()
