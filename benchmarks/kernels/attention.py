"""Attention kernels of the Llama-3.1-8B shape (32 q / 8 kv heads of 128) against their floors, on one GPU.

    PYTHONPATH=.:kernels python -m benchmarks.kernels.attention [--results FILE] [--sweep]

Decode: bytes of K/V read over the time of one layer (both kernels, planning apart). Prefill: 4 * dim FLOPs for each
(query, visible key) pair. Random pages of a pool of all 32 layers; calls are captured in one CUDA graph that walks the
layers, and the median over replays is reported. `--sweep` prints launch shapes instead of the cases below.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from segue_kernels.decode_attention import DecodeTiling, decode_attention, plan_decode
from segue_kernels.prefill_attention import PrefillTiling, plan_prefill, prefill_attention

from benchmarks.result_rows import RESULTS, ResultFile
from engine.attention.base import AttentionBatch, AttentionShape
from engine.attention.cudnn_backend import CudnnBackend
from engine.attention.triton_backend import TritonBackend

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
READ_TBPS = 4.6
"""Pure reads of one H200."""
MATMUL_TFLOPS = 779.0
"""bf16 matmul of 8192^3 of one H200."""
TOKENS_MAX = 64 * 8192
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Rows:
    """`count` equal rows of `length` tokens, the last `queries` of each being queries."""

    count: int
    length: int
    queries: int = 1
    block: int = 64
    kv_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        parts = [f"{self.count} x {self.length}"]
        if self.queries > 1:
            parts = [f"{self.count} x {self.queries} on {self.length - self.queries}"]
        parts += [f"block {self.block}"] if self.block != 64 else []
        parts += ["fp8"] if self.kv_dtype != torch.bfloat16 else []
        return ", ".join(parts)

    @property
    def kv_bytes(self) -> int:
        return self.count * self.length * 2 * KV_HEADS * DIM * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        pairs = self.queries * (self.length - self.queries) + self.queries * (self.queries + 1) // 2
        return self.count * 4 * DIM * HEADS * pairs


class Pool:
    """All layers' pages, seen with any block size and dtype, and random block tables into them."""

    def __init__(self) -> None:
        self.bytes = torch.empty(TOKENS_MAX * LAYERS * 2 * KV_HEADS * DIM, dtype=torch.bfloat16, device="cuda")
        self.bytes.normal_()
        self.fp8 = self.bytes.to(torch.float8_e4m3fn)

    def pages(self, rows: Rows) -> torch.Tensor:
        flat = self.bytes if rows.kv_dtype == torch.bfloat16 else self.fp8
        return flat.view(-1, LAYERS, 2, KV_HEADS, rows.block, DIM)

    def batch(self, rows: Rows, pages: int) -> AttentionBatch:
        blocks = -(-rows.length // rows.block)
        tables = torch.randperm(pages, device="cuda")[: rows.count * blocks].int().view(rows.count, blocks)
        starts = tuple(range(0, rows.count * rows.queries + 1, rows.queries))
        lengths = (rows.length,) * rows.count
        return AttentionBatch(
            block_tables=tables,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            query_starts=torch.tensor(starts, dtype=torch.int32, device="cuda"),
            max_query=rows.queries,
            max_seq=rows.length,
            decode_only=rows.queries == 1,
            seq_lens_host=lengths,
            query_starts_host=starts,
        )


def time_us(call: Callable[[int], None], calls: int, replays: int = 12) -> float:
    """Median microseconds of one call; `call(layer)` runs `calls` times, over the layers in turn, in one graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % LAYERS)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def calls_for(work_us: float) -> int:
    """Enough calls that a replay takes about 5 ms, each layer at most twice."""
    return max(2, min(2 * LAYERS, int(5000 / work_us)))


def decode_us(pool: Pool, rows: Rows, *, tiling: DecodeTiling | None = None, pdl: bool = True) -> float:
    pages = pool.pages(rows)
    batch = pool.batch(rows, pages.shape[0])
    q = torch.randn(rows.count, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    plan = plan_decode(
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        kv_dtype=rows.kv_dtype,
        tiling=tiling,
    )
    scales = None if rows.kv_dtype == torch.bfloat16 else torch.ones(LAYERS, 2, KV_HEADS, device="cuda")

    def call(layer: int) -> None:
        decode_attention(plan, layer, q, pages, out, scale=SCALE, kv_scales=scales, pdl=pdl)

    return time_us(call, calls_for(rows.kv_bytes / READ_TBPS / 1e6))


def planning_us(pool: Pool, rows: Rows) -> float:
    batch = pool.batch(rows, pool.pages(rows).shape[0])

    def call(_: int) -> None:
        plan_decode(
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            kv_dtype=rows.kv_dtype,
        )

    return time_us(call, 16)


def prefill_us(pool: Pool, rows: Rows, *, tiling: PrefillTiling | None = None) -> float:
    pages = pool.pages(rows)
    batch = pool.batch(rows, pages.shape[0])
    q = torch.randn(rows.count * rows.queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    plan = plan_prefill(
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        head_dim=DIM,
        q_dtype=q.dtype,
        max_query=rows.queries,
        query_counts=(rows.queries,) * rows.count,
        tiling=tiling,
    )
    scales = None if rows.kv_dtype == torch.bfloat16 else torch.ones(LAYERS, 2, KV_HEADS, device="cuda")

    def call(layer: int) -> None:
        prefill_attention(plan, layer, q, pages, out, scale=SCALE, kv_scales=scales)

    return time_us(call, calls_for(rows.flops / 400e6))


def backend_us(pool: Pool, rows: Rows, kind: type[TritonBackend | CudnnBackend]) -> float:
    pages = pool.pages(rows)
    batch = pool.batch(rows, pages.shape[0])
    q = torch.randn(rows.count * rows.queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    shape = AttentionShape(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, block_size=rows.block, dtype=q.dtype, device=q.device
    )
    backend = kind(shape)
    plan = backend.plan(batch)

    def call(layer: int) -> None:
        backend.forward(plan, layer, q, pages, scale=SCALE, window=None, soft_cap=None)

    return time_us(call, calls_for(rows.flops / 600e6))


DECODE_CASES = (
    Rows(64, 8192),
    Rows(64, 8192, block=16),
    Rows(64, 8192, kv_dtype=torch.float8_e4m3fn),
    Rows(256, 1024),
    Rows(16, 32768),
    Rows(64, 1024),
    Rows(8, 1024),
    Rows(1, 1024),
    Rows(1, 8192),
    Rows(1, 32768),
)
PREFILL_CASES = (
    Rows(1, 8192, 8192),
    Rows(1, 16384, 16384),
    Rows(1, 32768, 2048),
    Rows(1, 8320, 128),
    Rows(8, 1024, 1024),
    Rows(1, 8192, 8192, kv_dtype=torch.float8_e4m3fn),
)
SLICED_CASES = (Rows(1, 8320, 128), Rows(1, 8448, 256), Rows(1, 32896, 128), Rows(4, 8256, 64))
CUDNN_CASES = (Rows(1, 8192, 8192), Rows(1, 16384, 16384), Rows(1, 32768, 2048), Rows(1, 32768, 8192))


def record(results: ResultFile, name: str, rows: Rows, us: float, rate: float, unit: str, ceiling: float) -> None:
    results.add(f"{name} {rows}", "time", us, "us")
    results.add(f"{name} {rows}", "rate", rate, unit)
    results.add(f"{name} {rows}", "of floor", rate / ceiling * 100, "%")


def measure(pool: Pool, results: ResultFile) -> None:
    for rows in DECODE_CASES:
        us = decode_us(pool, rows)
        record(results, "decode", rows, us, rows.kv_bytes / us / 1e6, "TB/s", READ_TBPS)
    for rows in (Rows(1, 1024), Rows(256, 1024)):
        results.add(f"decode plan {rows}", "time", planning_us(pool, rows), "us")
    for rows in PREFILL_CASES:
        us = prefill_us(pool, rows)
        record(results, "prefill triton", rows, us, rows.flops / us / 1e6, "TFLOP/s", MATMUL_TFLOPS)
    for rows in SLICED_CASES:
        us = backend_us(pool, rows, TritonBackend)
        record(results, "prefill sliced", rows, us, rows.flops / us / 1e6, "TFLOP/s", MATMUL_TFLOPS)
    for rows in CUDNN_CASES:
        us = backend_us(pool, rows, CudnnBackend)
        record(results, "prefill cudnn", rows, us, rows.flops / us / 1e6, "TFLOP/s", MATMUL_TFLOPS)


def sweep(pool: Pool) -> None:
    """Print rates of launch shapes around the defaults; nothing is recorded."""
    shapes = [Rows(64, 8192), *(Rows(count, 1024) for count in (256, 64, 8, 1)), Rows(1, 32768)]
    print("decode TB/s at", *shapes, sep="; ")
    for stages, programs in itertools.product((5, 7), (6, 12)):
        tiling = DecodeTiling(64, 2, stages, programs)
        _print_rates(tiling, [rows.kv_bytes / decode_us(pool, rows, tiling=tiling) / 1e6 for rows in shapes])
    fp8 = [replace(rows, kv_dtype=torch.float8_e4m3fn) for rows in shapes[:3]]
    for tile, warps, stages in ((64, 2, 7), (64, 4, 5), (64, 4, 7), (128, 4, 5)):
        tiling = DecodeTiling(tile, warps, stages)
        _print_rates(tiling, [rows.kv_bytes / decode_us(pool, rows, tiling=tiling) / 1e6 for rows in fp8])
    chunks = [Rows(1, 8192, 8192), Rows(1, 32768, 2048), Rows(8, 1024, 1024)]
    print("prefill TFLOP/s at", *chunks, sep="; ")
    blocks = {(64, 64, 4): (5, 6, 7), (64, 128, 4): (5,), (128, 64, 4): (5,), (128, 64, 8): (5,), (128, 128, 8): (5,)}
    for (block_m, tile, warps), depths in blocks.items():
        for stages in depths:
            prefill = PrefillTiling(block_m, tile, warps, stages)
            _print_rates(prefill, [rows.flops / prefill_us(pool, rows, tiling=prefill) / 1e6 for rows in chunks])
    fp8_chunk = replace(chunks[0], kv_dtype=torch.float8_e4m3fn)
    for prefill in (PrefillTiling(64, 64, 4, 5), PrefillTiling(128, 32, 4, 5)):
        _print_rates(prefill, [fp8_chunk.flops / prefill_us(pool, fp8_chunk, tiling=prefill) / 1e6])


def _print_rates(tiling: DecodeTiling | PrefillTiling, rates: list[float]) -> None:
    print(tiling, *(f"{rate:.2f}" if rate < 10 else f"{rate:.0f}" for rate in rates), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", type=Path, default=RESULTS / "kernels_h200.csv")
    arguments.add_argument("--sweep", action="store_true")
    options = arguments.parse_args()
    torch.manual_seed(0)
    pool = Pool()
    if options.sweep:
        sweep(pool)
        return
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    measure(pool, ResultFile(options.results, device=device, command="benchmarks/kernels/attention.py"))


if __name__ == "__main__":
    main()
