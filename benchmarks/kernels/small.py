"""Products and small kernels of a decode step against their floors, on one GPU; Llama-3.1-8B shape.

    PYTHONPATH=.:kernels python -m benchmarks.kernels.small [--results FILE] [--sweep 1,8] [--fp8]

Calls are captured in one CUDA graph that walks as many weight copies as overflow the L2 cache; a time is that of a
replay divided by its calls, median over replays. Floor: weight bytes at the rate of pure reads. `--sweep` times launch
shapes of the fused products and prints the best; candidates are compiled in parallel first. `--fp8` does the products
of a layer alone, with fp8 weights, beside cuBLAS's with fp8 on both sides (what steps of larger batches take).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from segue_kernels.activation import silu_mul
from segue_kernels.decode_state import Places
from segue_kernels.general_sampling import GeneralSampling
from segue_kernels.norm import rms_norm
from segue_kernels.rope_store import rope_store
from segue_kernels.row_sampling import RowTable, RowWish
from segue_kernels.sampling import SampleScratch, sample
from segue_kernels.skinny_gemm import GemvTile, gemv, gemv_gated, gemv_rope
from segue_kernels.skinny_gemm_dot import DotTile, skinny_gated, skinny_linear

from benchmarks.result_rows import RESULTS, ResultFile
from engine.cuda.fused_decode import stored
from engine.cuda.tiles import FP8_TILES, H200_TILES
from engine.fp8 import Fp8Weight, fp8_weight

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128_256
READ_TBPS = 4.6
"""Pure reads of one H200."""
Weight = torch.Tensor | Fp8Weight
COLD_BYTES = 400 << 20
"""Weight copies together exceed this, several times the L2 cache."""
EPS = 1e-5


@dataclass(frozen=True)
class Product:
    """One linear layer: weight rows and columns, and what is fused around it."""

    name: str
    rows: int
    columns: int

    def weight_bytes(self, fp8: bool) -> int:
        return self.rows * self.columns * (1 if fp8 else 2)


QKV = Product("qkv", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
OUT = Product("o", HIDDEN, HIDDEN)
GATE_UP = Product("gate_up", 2 * WIDTH, HIDDEN)
DOWN = Product("down", HIDDEN, WIDTH)
HEAD = Product("head", VOCAB, HIDDEN)
PRODUCTS = (QKV, OUT, GATE_UP, DOWN, HEAD)


class Operands:
    """Random inputs of one product for `batch` rows; `copies` weights, or one of few rows to compile with."""

    def __init__(self, product: Product, batch: int, *, small: bool = False, fp8: bool = False) -> None:
        self.product, self.batch, self.fp8 = product, batch, fp8
        rows = QKV.rows if product is QKV else 1024
        rows = rows if small else product.rows
        copies = 1 if small else max(2, -(-COLD_BYTES // product.weight_bytes(fp8)))
        make = {"dtype": torch.bfloat16, "device": "cuda"}
        weights = [torch.randn(rows, product.columns, **make) * product.columns**-0.5 for _ in range(copies)]
        self.weights: list[Weight] = [fp8_weight(weight) for weight in weights] if fp8 else list(weights)
        self.x = torch.randn(batch, product.columns, **make)
        self.gain = torch.rand(product.columns, device="cuda")
        self.out = torch.randn(batch, rows // 2 if product is GATE_UP else rows, **make)
        self.logits = torch.empty(batch, rows if product is HEAD else 1, device="cuda")
        self.rope = torch.randn(batch, DIM, device="cuda")
        self.slots = torch.arange(batch, device="cuda") * 70
        self.pages = torch.zeros(batch * 2, 2, 2, KV_HEADS, 64, DIM, **make)


def single(o: Operands, weight: Weight, tile: GemvTile, pdl: bool = True) -> None:
    """The batch-1 kernel of a product, as the decode step launches it."""
    w, scales = stored(weight)
    if o.product is QKV:
        gemv_rope(o.x, w, o.gain, EPS, o.rope, o.slots, o.pages, 1, HEADS, scales=scales, tile=tile, pdl=pdl)
    elif o.product is GATE_UP:
        gemv_gated(o.x, w, o.gain, EPS, scales=scales, out=o.out, tile=tile, pdl=pdl)
    elif o.product is HEAD:
        gemv(o.x, w, gain=o.gain, eps=EPS, out=o.logits, tile=tile, pdl=pdl)
    else:
        gemv(o.x, w, residual=o.out, scales=scales, tile=tile, pdl=pdl)


def small(o: Operands, weight: Weight, tile: DotTile, pdl: bool = True) -> None:
    """The small-batch kernel of a product."""
    w, scales = stored(weight)
    if o.product is GATE_UP:
        skinny_gated(o.x, w, scales=scales, out=o.out, tile=tile, pdl=pdl)
    elif o.product is HEAD:
        skinny_linear(o.x, w, out=o.logits, tile=tile, pdl=pdl)
    else:
        residual = o.out if o.product in (OUT, DOWN) else None
        skinny_linear(o.x, w, residual=residual, scales=scales, out=o.out, tile=tile, pdl=pdl)


def graph_us(call: Callable[[Any], object], weights: Sequence[Any], replays: int = 20) -> float:
    """Median microseconds of one call, over cold weights."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times[3:])


def tile_us(o: Operands, tile: GemvTile | DotTile, replays: int = 20) -> float:
    if isinstance(tile, GemvTile):
        return graph_us(lambda w: single(o, w, tile), o.weights, replays)
    return graph_us(lambda w: small(o, w, tile), o.weights, replays)


def library_us(o: Operands) -> float:
    """cuBLAS alone, without what is fused around it; in fp8 with the rounding of x that it needs."""
    return graph_us(lambda w: w.product(o.x) if o.fp8 else torch.mm(o.x, w.T), o.weights)


def gemv_tiles(product: Product) -> Iterator[GemvTile]:
    """Tiles of 16 to 64 weights per thread, at most 28 of them along K."""
    doubled = 2 if product in (QKV, GATE_UP) else 1
    sizes = itertools.product((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), (2, 4, 8))
    for rows, columns, warps in sizes:
        per_thread = rows * doubled * columns // (warps * 32)
        if 16 <= per_thread <= 64 and 1 < product.columns // columns <= 28:
            yield GemvTile(rows, columns, warps)


def dot_tiles(product: Product, fp8: bool) -> Iterator[DotTile]:
    """Tiles that keep 48 (in fp8 24) to 200 KB on their way into shared memory."""
    doubled = 2 if product is GATE_UP else 1
    for rows, columns, stages, warps in itertools.product((16, 32, 64), (128, 256, 512, 1024), (3, 4, 6), (2, 4)):
        stage_bytes = rows * doubled * columns * (1 if fp8 else 2) + 8 * columns * 2
        if stage_bytes * (stages - 1) >= (24_576 if fp8 else 49_152) and stage_bytes * stages <= 220_000:
            yield DotTile(rows, columns, stages, warps, prefetch=min(1024, 2 * columns))


def _compile(job: tuple[Product, int, list[GemvTile | DotTile], bool]) -> None:
    product, batch, tiles, fp8 = job
    operands = Operands(product, batch, small=True, fp8=fp8)
    for tile in tiles:
        if isinstance(tile, GemvTile):
            single(operands, operands.weights[0], tile)
        else:
            small(operands, operands.weights[0], tile)
    torch.cuda.synchronize()


def sweep(batches: tuple[int, ...], best_path: Path | None, fp8: bool) -> None:
    """Best launch shapes of each product, in microseconds; the winners go to `best_path` as JSON."""
    lists = {
        (product, batch): list(gemv_tiles(product) if batch == 1 else dot_tiles(product, fp8))
        for product in measured(fp8)
        for batch in batches
    }
    jobs = [(p, b, tiles[part::4], fp8) for (p, b), tiles in lists.items() for part in range(4)]
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))
    best = {}
    for (product, batch), tiles in lists.items():
        operands = Operands(product, batch, fp8=fp8)
        floor_us = product.weight_bytes(fp8) / READ_TBPS / 1e6
        timed = sorted(((tile_us(operands, tile, 10), tile) for tile in tiles), key=lambda entry: entry[0])
        print(f"{product.name} batch {batch}: floor {floor_us:.1f}, cuBLAS {library_us(operands):.1f}", flush=True)
        for value, tile in timed[:4]:
            print(f"    {value:7.2f}  {tile}", flush=True)
        best[f"{'single' if batch == 1 else 'small'}_{product.name}"] = asdict(timed[0][1])
    if best_path is not None:
        best_path.write_text(json.dumps(best, indent=1))


def measured(fp8: bool) -> tuple[Product, ...]:
    """The head is never quantised."""
    return tuple(product for product in PRODUCTS if not (fp8 and product is HEAD))


def products(results: ResultFile, fp8: bool) -> None:
    """Each product with the tile the engine uses, and cuBLAS beside it."""
    for product, batch in itertools.product(measured(fp8), (1, 2, 4, 8, 16)):
        operands = Operands(product, batch, fp8=fp8)
        kind = "single" if batch == 1 else "small"
        ours_us = tile_us(operands, getattr(FP8_TILES if fp8 else H200_TILES, f"{kind}_{product.name}"))
        shape = f"{product.name}{' fp8' if fp8 else ''}, batch {batch}"
        results.add(shape, "time", ours_us, "us")
        results.add(shape, "of floor", product.weight_bytes(fp8) / READ_TBPS / 1e6 / ours_us, "")
        results.add(shape, "cuBLAS", library_us(operands), "us")


def pointwise(results: ResultFile) -> None:
    """Kernels bound by activations, at a prefill's size; floor: bytes moved at the copy rate, 4.27 TB/s."""
    tokens = 8192
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    x, residual = torch.randn(tokens, HIDDEN, **make), torch.randn(tokens, HIDDEN, **make)
    gain = torch.rand(HIDDEN, device="cuda")
    gate_up, qkv = torch.randn(tokens, 2 * WIDTH, **make), torch.randn(tokens, QKV.rows, **make)
    rope = torch.randn(tokens, DIM, device="cuda")
    pages = torch.zeros(tokens // 64, 2, 2, KV_HEADS, 64, DIM, **make)
    slots = torch.arange(tokens, device="cuda")
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "norm + residual": (lambda: rms_norm(x, gain, EPS, residual=residual), 4 * x.nbytes),
        "silu * up": (lambda: silu_mul(gate_up), gate_up.nbytes * 3 // 2),
        "rope + store": (lambda: rope_store(qkv, rope, slots, pages, 1, HEADS), 2 * qkv.nbytes),
    }
    for name, (call, moved) in cases.items():
        spent_us = graph_us(lambda _, c=call: c(), [x] * 4)
        results.add(f"{name}, {tokens} tokens", "time", spent_us, "us")
        results.add(f"{name}, {tokens} tokens", "of floor", moved / 4.27e6 / spent_us, "")


def sampling(results: ResultFile) -> None:
    """Token choice for a whole batch, greedy and at a temperature."""
    for batch, temperature in itertools.product((1, 256), (0.0, 0.8)):
        logits = torch.randn(batch, VOCAB, device="cuda")
        words = torch.zeros(Places.WORDS, batch, dtype=torch.int32, device="cuda")
        places = Places.of(words)
        places.rows.copy_(torch.arange(batch))
        places.temperatures.fill_(temperature)
        tokens = torch.zeros(batch, 4096, dtype=torch.int64, device="cuda")
        chosen = torch.empty(batch, dtype=torch.int32, device="cuda")
        scratch = SampleScratch.allocate(batch, VOCAB, torch.device("cuda"))

        step = partial(sample, logits, places, tokens, chosen, scratch, VOCAB, pdl=True)
        spent_us = graph_us(lambda _, run=step: run(), [logits] * 4)
        results.add(f"sample, batch {batch}, temperature {temperature}", "time", spent_us, "us")


GENERAL = {
    "plain": None,
    "top-k 50": RowWish(top_k=50),
    "top-p 0.9": RowWish(top_p=0.9),
    "top-k 50, top-p 0.9, min-p 0.01": RowWish(top_k=50, top_p=0.9, log_min_p=math.log(0.01)),
    "penalties": RowWish(frequency=0.5, repetition=1.1),
    "greedy, 5 log-probabilities": RowWish(logprobs=5),
}


def general_sampling(results: ResultFile) -> None:
    """Rows with filters and penalties at temperature 0.8, on flat logits (normal, deviation 1) and peaked ones (4).
    Floor: logits read and scores written once at the copy rate."""
    for batch, (name, wish), spread in itertools.product((1, 256), GENERAL.items(), (1.0, 4.0)):
        logits = torch.randn(batch, VOCAB, device="cuda") * spread
        places = Places.of(torch.zeros(Places.WORDS, batch, dtype=torch.int32, device="cuda"))
        places.rows.copy_(torch.arange(batch))
        places.temperatures.fill_(0.0 if name.startswith("greedy") else 0.8)
        places.seeds.copy_(torch.arange(batch))
        counts = torch.zeros(batch, VOCAB, dtype=torch.int32, device="cuda")
        table = RowTable.allocate(counts, counts.bool())
        if wish is not None:
            words = torch.from_numpy(wish.words())
            table.words[:, : len(words)] = words.cuda()
        general = GeneralSampling.allocate(table, batch, VOCAB)
        tokens = torch.zeros(batch, 4096, dtype=torch.int64, device="cuda")
        chosen = torch.empty(batch, dtype=torch.int32, device="cuda")
        scratch = SampleScratch.allocate(batch, VOCAB, torch.device("cuda"))
        step = partial(sample, logits, places, tokens, chosen, scratch, VOCAB, general=general, pdl=True)
        spent_us = graph_us(lambda _, run=step: run(), [logits] * 4)
        shape = f"sample {name}, batch {batch}, deviation {spread:g}"
        floor_us = (1 if wish is None else 2) * logits.nbytes / (READ_TBPS if wish is None else 4.27) / 1e6
        results.add(shape, "time", spent_us, "us")
        results.add(shape, "of floor", floor_us / spent_us, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS / "small_kernels_h200.csv")
    parser.add_argument("--sweep", default="", help="batch sizes, such as 1,8")
    parser.add_argument("--fp8", action="store_true", help="the products of a layer alone, with fp8 weights")
    parser.add_argument("--only", choices=("sampling",), help="leave the rest out")
    parser.add_argument("--best", type=Path, help="JSON file for the sweep's winners")
    options = parser.parse_args()
    if options.sweep:
        sweep(tuple(int(batch) for batch in options.sweep.split(",")), options.best, options.fp8)
        return
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    results = ResultFile(options.results, device=device, command="kernels.small")
    if options.fp8:
        products(results, fp8=True)
        return
    if options.only is None:
        products(results, fp8=False)
        pointwise(results)
    sampling(results)
    general_sampling(results)


if __name__ == "__main__":
    main()
