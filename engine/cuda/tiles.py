"""Launch shapes of the fused decode products, from sweeps on an H200 (benchmarks/kernels/small.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from segue_kernels.skinny_gemm import GemvTile
from segue_kernels.skinny_gemm_dot import DotTile

from engine.fp8 import Fp8Weight
from engine.parameters import ModelParameters


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """One tile for each product of a layer and for the head; `single` is batch 1, `small` 2 to 16."""

    single_qkv: GemvTile
    single_o: GemvTile
    single_gate_up: GemvTile
    single_down: GemvTile
    single_head: GemvTile
    small_qkv: DotTile
    small_o: DotTile
    small_gate_up: DotTile
    small_down: DotTile
    small_head: DotTile


def tiles_for(parameters: ModelParameters) -> DecodeTiles:
    """By what the linear layers are stored in."""
    return FP8_TILES if isinstance(parameters.layers[0].qkv, Fp8Weight) else H200_TILES


H200_TILES = DecodeTiles(
    single_qkv=GemvTile(rows=2, columns=2048, warps=4),
    single_o=GemvTile(rows=4, columns=2048, warps=8),
    single_gate_up=GemvTile(rows=2, columns=2048, warps=8),
    single_down=GemvTile(rows=4, columns=2048, warps=8),
    single_head=GemvTile(rows=8, columns=2048, warps=8),
    small_qkv=DotTile(rows=16, columns=256, stages=6, warps=2, prefetch=512),
    small_o=DotTile(rows=32, columns=512, stages=4, warps=4, prefetch=1024),
    small_gate_up=DotTile(rows=64, columns=256, stages=3, warps=4, prefetch=512),
    small_down=DotTile(rows=32, columns=512, stages=4, warps=4, prefetch=1024),
    small_head=DotTile(rows=32, columns=256, stages=4, warps=2, prefetch=512),
)
"""Microseconds at batch 1 / 8, floor in brackets, cuBLAS in the same run 15.8 / 15.7, 12.8 / 12.7, 58.8 / 58.9, 31.8 /
33.0, 247 / 258: qkv 13.6 / 15.0 (10.9), o 9.8 / 11.0 (7.3), gate_up 56.2 / 59.8 (51.1), down 29.7 / 31.4 (25.5), head
233 / 245 (228)."""

FP8_TILES = replace(
    H200_TILES,
    small_qkv=DotTile(rows=16, columns=512, stages=4, warps=2, prefetch=1024),
    small_gate_up=DotTile(rows=32, columns=256, stages=4, warps=4, prefetch=1024),
)
"""For fp8 weights; not measured yet: `--fp8 --sweep` of the benchmark times them. Tiles have half the bytes. Those of a
lone row cannot be larger, as their sums fill the registers, nor can two of 64 x 256, as they spill when widened."""
