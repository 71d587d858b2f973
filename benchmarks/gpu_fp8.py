"""fp8 weights and fp8 K/V against bfloat16 on one GPU: distance of the logits, and the time of steps.

    PYTHONPATH=.:kernels:proto python -m benchmarks.gpu_fp8 [--results FILE]

Llama-3.1-8B shape, random weights. Distances are over 512 positions of one random prompt whose first half is cached:
KL(bfloat16 || variant) in nats, how often the best token is the same, and the relative error in norm. Random weights
give nearly flat distributions, where the best token changes more easily than in a trained model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path

import torch

from benchmarks.gpu_engine import BLOCK, Bench
from benchmarks.result_rows import RESULTS, ResultFile
from engine.cuda.random_model import llama_8b_spec, random_model
from engine.engine import KV_DTYPES, build_model
from engine.row_state import RowState
from engine.step_batch import build_step
from segue.config import EngineConfig
from segue.plan import Chunk

VARIANTS = {"bf16": ("", "auto"), "fp8 weights": ("fp8", "auto"), "fp8 KV": ("", "fp8"), "fp8 both": ("fp8", "fp8")}
TOKENS = 512


def logits_of(quantization: str, kv_dtype: str) -> torch.Tensor:
    """float32 [TOKENS, vocab] on the host; the second half reads the first from pages."""
    device = torch.device("cuda")
    info = random_model(
        llama_8b_spec(),
        dtype=torch.bfloat16,
        device=device,
        block_size=BLOCK,
        pages_total=TOKENS // BLOCK + 1,
        max_model_len=2 * TOKENS,
        kv_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else None,
    )
    model = build_model(info, EngineConfig(), positions_max=2 * TOKENS, quantization=quantization)
    pages = torch.zeros(info.pages_total, *info.layout.page_shape, dtype=KV_DTYPES[info.layout.dtype], device=device)
    state = RowState(1, 2 * TOKENS, BLOCK, device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1000, 120_000, (TOKENS,), generator=generator).tolist()
    state.start(0, 1, tokens, list(range(info.pages_total)))
    half, parts = TOKENS // 2, []
    with torch.inference_mode():
        for first in (0, half):
            step = build_step(state, [Chunk(0, first, half, False)], []).model_input
            parts.append(model.logits(model.hidden_states(step, pages)).cpu())
    return torch.cat(parts)


def quality(results: ResultFile) -> None:
    exact = logits_of(*VARIANTS["bf16"])
    log_exact = exact.log_softmax(-1)
    for name, variant in VARIANTS.items():
        if name == "bf16":
            continue
        gc.collect()
        torch.cuda.empty_cache()
        logits = logits_of(*variant)
        divergence = (log_exact.exp() * (log_exact - logits.log_softmax(-1))).sum(-1)
        results.add(f"{name}, {TOKENS} tokens", "mean KL to bf16", float(divergence.mean()), "nat")
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        results.add(f"{name}, {TOKENS} tokens", "same best token", float(same), "")
        results.add(f"{name}, {TOKENS} tokens", "relative error", float((logits - exact).norm() / exact.norm()), "")


def speed(results: ResultFile) -> None:
    for name, (quantization, kv_dtype) in VARIANTS.items():
        gc.collect()
        torch.cuda.empty_cache()
        bench = Bench(quantization=quantization, kv_dtype=kv_dtype)
        bench.engine.pages.view(torch.int8).random_(40, 60)
        for count, context in ((1, 1024), (64, 1024), (256, 1024), (64, 8192)):
            for _ in range(count):
                bench.land(context, 30)
            bench.run()
            results.add(f"{name}, {count} x {context}", "step", bench.step_ms(), "ms")
        for length in (4096,):
            values = []
            for _ in range(4):
                seq = bench.add(bench.tokens(length), 1)
                bench.run()
                values.append(bench.stamps[seq].first_ms)
            results.add(f"{name}, 1 x {length}", "ttft", statistics.median(values[1:]), "ms")
        bench.engine.close()
        del bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_fp8_h200.csv")
    options = parser.parse_args()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    results = ResultFile(options.results, device=device, command="gpu_fp8")
    quality(results)
    speed(results)


if __name__ == "__main__":
    main()
