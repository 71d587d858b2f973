"""Every small kernel compiles for each architecture at the shapes of an 8B model, without spilling registers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cuda.tiles import FP8_TILES, DecodeTiles
from tests.kernels.compiling import ARCHS, CompileReport, compile_kernel

NORM = ("segue_kernels.norm", "rms_norm_kernel")
SILU = ("segue_kernels.activation", "silu_mul_kernel")
EMBED = ("segue_kernels.embedding", "embedding_kernel")
ROPE = ("segue_kernels.rope_store", "rope_store_kernel")
GEMV = ("segue_kernels.skinny_gemm", "gemv_kernel")
GATED = ("segue_kernels.skinny_gemm", "gemv_gated_kernel")
GEMV_ROPE = ("segue_kernels.skinny_gemm", "gemv_rope_kernel")
PARTIAL = ("segue_kernels.sampling", "partial_argmax_kernel")
FINISH = ("segue_kernels.sampling", "finish_kernel")
SHAPE = ("segue_kernels.shaped_logits", "shape_logits_kernel")
CHOOSE = ("segue_kernels.general_choice", "choose_kernel")
REPORT = ("segue_kernels.logprob_report", "report_kernel")
BEGIN = ("segue_kernels.decode_state", "begin_step_kernel")
DOT = ("segue_kernels.skinny_gemm_dot", "skinny_linear_kernel")

SIGNATURES: dict[str, dict[str, str]] = {
    "rms_norm_kernel": {
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "gain_ptr": "*bf16",
        "out_ptr": "*bf16",
        "eps": "fp32",
    },
    "silu_mul_kernel": {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
    "embedding_kernel": {"ids_ptr": "*i32", "table_ptr": "*bf16", "out_ptr": "*bf16"},
    "rope_store_kernel": {
        "qkv_ptr": "*bf16",
        "rope_ptr": "*fp32",
        "slots_ptr": "*i64",
        "q_ptr": "*bf16",
        "pages_ptr": "*bf16",
        "layer": "i32",
        "page_stride": "i64",
    },
    "partial_argmax_kernel": {
        "logits_ptr": "*fp32",
        "rows_ptr": "*i32",
        "positions_ptr": "*i32",
        "temperatures_ptr": "*fp32",
        "seeds_ptr": "*i32",
        "table_ptr": "*i32",
        "values_ptr": "*fp32",
        "indices_ptr": "*i32",
        "invalid_ptr": "*i32",
        "vocab_size": "i32",
        "logits_stride": "i32",
        "seeds_stride": "i32",
        "table_stride": "i32",
    },
    "shape_logits_kernel": {
        "logits_ptr": "*fp32",
        "rows_ptr": "*i32",
        "positions_ptr": "*i32",
        "temperatures_ptr": "*fp32",
        "table_ptr": "*i32",
        "generated_ptr": "*i32",
        "in_prompt_ptr": "*i1",
        "scores_ptr": "*fp32",
        "peaks_ptr": "*fp32",
        "masses_ptr": "*fp32",
        "raw_peaks_ptr": "*fp32",
        "invalid_ptr": "*i32",
        "raw_max_ptr": "*fp32",
        "raw_sum_ptr": "*fp32",
        "vocab_size": "i32",
        "groups": "i32",
        "logits_stride": "i32",
        "table_stride": "i32",
        "counts_stride": "i32",
        "scores_stride": "i32",
    },
    "choose_kernel": {
        "rows_ptr": "*i32",
        "positions_ptr": "*i32",
        "temperatures_ptr": "*fp32",
        "seeds_ptr": "*i32",
        "table_ptr": "*i32",
        "generated_ptr": "*i32",
        "scores_ptr": "*fp32",
        "peaks_ptr": "*fp32",
        "masses_ptr": "*fp32",
        "invalid_ptr": "*i32",
        "groups_ptr": "*i32",
        "values_ptr": "*fp32",
        "indices_ptr": "*i32",
        "chosen_value_ptr": "*fp32",
        "chosen_index_ptr": "*i32",
        "chosen_invalid_ptr": "*i32",
        "vocab_size": "i32",
        "groups": "i32",
        "parts": "i32",
        "chosen_stride": "i32",
        "seeds_stride": "i32",
        "table_stride": "i32",
        "counts_stride": "i32",
        "scores_stride": "i32",
    },
    "report_kernel": {
        "logits_ptr": "*fp32",
        "rows_ptr": "*i32",
        "table_ptr": "*i32",
        "raw_peaks_ptr": "*fp32",
        "raw_max_ptr": "*fp32",
        "raw_sum_ptr": "*fp32",
        "chosen_index_ptr": "*i32",
        "report_ptr": "*fp32",
        "vocab_size": "i32",
        "groups": "i32",
        "parts": "i32",
        "chosen_stride": "i32",
        "logits_stride": "i32",
        "table_stride": "i32",
    },
    "finish_kernel": {
        "values_ptr": "*fp32",
        "indices_ptr": "*i32",
        "invalid_ptr": "*i32",
        "rows_ptr": "*i32",
        "tokens_ptr": "*i64",
        "positions_ptr": "*i32",
        "results_ptr": "*i32",
        "parts": "i32",
        "tokens_stride": "i32",
    },
    "begin_step_kernel": {
        "rows_ptr": "*i32",
        "tokens_ptr": "*i64",
        "positions_ptr": "*i32",
        "tables_ptr": "*i32",
        "embedding_ptr": "*bf16",
        "x_ptr": "*bf16",
        "rope_ptr": "*fp32",
        "token_ids_ptr": "*i64",
        "batch_positions_ptr": "*i64",
        "slots_ptr": "*i64",
        "seq_lens_ptr": "*i32",
        "batch_tables_ptr": "*i32",
        "batch_rope_ptr": "*fp32",
        "tokens_stride": "i32",
        "tables_stride": "i32",
        "batch_tables_stride": "i32",
    },
    "gemv_kernel": {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "scales_ptr": "*fp32",
        "gain_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "out_ptr": "*bf16",
        "N": "i32",
        "eps": "fp32",
    },
    "gemv_gated_kernel": {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "scales_ptr": "*fp32",
        "gain_ptr": "*bf16",
        "out_ptr": "*bf16",
        "width": "i32",
        "eps": "fp32",
    },
    "gemv_rope_kernel": {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "scales_ptr": "*fp32",
        "gain_ptr": "*bf16",
        "rope_ptr": "*fp32",
        "slot_ptr": "*i64",
        "q_ptr": "*bf16",
        "pages_ptr": "*bf16",
        "layer": "i32",
        "page_stride": "i64",
        "eps": "fp32",
    },
    "skinny_linear_kernel": {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "scales_ptr": "*fp32",
        "residual_ptr": "*bf16",
        "out_ptr": "*bf16",
        "M": "i32",
        "N": "i32",
    },
}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "PAGE_SIZE": 64}
DOT_TILE = {"K": 4096, "BLOCK_M": 8, "BLOCK_N": 32, "BLOCK_K": 256, "STAGES": 4, "PREFETCH": 1024}


def gemv_tile(k: int, block_n: int) -> dict[str, int]:
    return {"K": k, "BLOCK_N": block_n, "BLOCK_K": 1024}


CASES: dict[str, tuple[tuple[str, str], dict[str, Any], int]] = {
    "norm": (NORM, {"HIDDEN": 4096, "BLOCK": 4096, "HAS_RESIDUAL": True}, 8),
    "norm_wide": (NORM, {"HIDDEN": 5000, "BLOCK": 8192, "HAS_RESIDUAL": False}, 8),
    "silu": (SILU, {"WIDTH": 14336, "BLOCK": 1024}, 4),
    "embedding": (EMBED, {"HIDDEN": 4096, "BLOCK": 1024}, 4),
    "rope": (ROPE, dict(**HEADS, BLOCK=64, GROUP=8), 2),
    "rope_odd": (ROPE, {"HEADS": 9, "KV_HEADS": 3, "DIM": 80, "PAGE_SIZE": 16, "BLOCK": 64, "GROUP": 1}, 1),
    "gemv_o": (GEMV, dict(**gemv_tile(4096, 4), HAS_NORM=False, HAS_RESIDUAL=True), 4),
    "gemv_down": (GEMV, dict(**gemv_tile(14336, 4), HAS_NORM=False, HAS_RESIDUAL=True), 4),
    "gemv_head": (GEMV, dict(**gemv_tile(4096, 4), HAS_NORM=True, HAS_RESIDUAL=False), 4),
    "gemv_gated": (GATED, gemv_tile(4096, 2), 4),
    "gemv_rope": (GEMV_ROPE, dict(**HEADS, **gemv_tile(4096, 2)), 4),
    "partial_argmax": (PARTIAL, {"BLOCK": 1024, "STEPS": 4, "HAS_TABLE": True}, 4),
    "shape_logits": (SHAPE, {"BLOCK": 1024, "STEPS": 4}, 8),
    "choose": (CHOOSE, {"LIST_MAX": 16384, "GROUPS_BLOCK": 2048, "PARTS_BLOCK": 8, "TILE": 2048}, 8),
    "choose_few": (CHOOSE, {"LIST_MAX": 16384, "GROUPS_BLOCK": 2048, "PARTS_BLOCK": 128, "TILE": 4096}, 16),
    "report": (REPORT, {"GROUPS_BLOCK": 2048, "PARTS_BLOCK": 32}, 4),
    "finish": (FINISH, {"BLOCK": 128}, 1),
    "begin_step": (BEGIN, {"HIDDEN": 4096, "DIM": 128, "PAGE_SIZE": 64, "BLOCK": 1024}, 4),
    "dot_linear": (DOT, dict(**DOT_TILE, GATED=False, HAS_RESIDUAL=True), 4),
    "dot_gated": (DOT, {**DOT_TILE, "BLOCK_M": 16, "STAGES": 3, "GATED": True, "HAS_RESIDUAL": False}, 4),
}
PRODUCTS = {"gemv_kernel", "gemv_gated_kernel", "gemv_rope_kernel", "skinny_linear_kernel"}
WITHOUT_PDL = {"embedding_kernel", "begin_step_kernel"}


def compiled(case: str, arch: int, *, fp8: bool = False) -> CompileReport:
    (module, kernel), constexprs, warps = CASES[case]
    signature = SIGNATURES[kernel]
    if kernel in PRODUCTS:
        constexprs = {**constexprs, "HAS_SCALES": fp8}
        signature = signature | {"w_ptr": "*fp8e4nv" if fp8 else "*bf16"}
    if kernel == "skinny_linear_kernel":
        constexprs = {**constexprs, "UPCAST": False}
    if kernel not in WITHOUT_PDL:
        constexprs = {**constexprs, "PDL": arch >= 90}
    return compile_kernel(
        module,
        kernel,
        arch=arch,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=[name for name, kind in signature.items() if kind.startswith("*")],
        num_warps=warps,
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_kernel_compiles_without_spills(case: str, arch: int) -> None:
    report = compiled(case, arch)
    assert report.spill_bytes == 0
    if CASES[case][0][1] not in WITHOUT_PDL:
        assert report.uses("griddepcontrol.wait") == (arch >= 90)


@pytest.mark.parametrize("case", ["gemv_o", "gemv_gated", "gemv_rope"])
def test_first_weights_are_loaded_before_the_wait(case: str) -> None:
    before, _, _ = compiled(case, 90).ptx.partition("griddepcontrol.wait")
    assert ".v4.b32" in before and "ld.global" in before


def test_small_batch_product_prefetches_weights_before_the_wait() -> None:
    before, _, _ = compiled("dot_linear", 90).ptx.partition("griddepcontrol.wait")
    assert "prefetch.global.L2" in before


@pytest.mark.parametrize("case", [case for case, ((_, kernel), *_) in CASES.items() if kernel in PRODUCTS])
def test_products_with_fp8_weights_compile_without_spills(case: str) -> None:
    report = compiled(case, 90, fp8=True)
    assert report.spill_bytes == 0
    assert report.uses("cvt.rn.f16x2.e4m3x2"), "two numbers for each conversion"


INNER = {"qkv": 4096, "o": 4096, "gate_up": 4096, "down": 14336}
SINGLE = {
    "qkv": (GEMV_ROPE, HEADS),
    "o": (GEMV, {"HAS_NORM": False, "HAS_RESIDUAL": True}),
    "gate_up": (GATED, {}),
    "down": (GEMV, {"HAS_NORM": False, "HAS_RESIDUAL": True}),
}


def compiled_product(product: str, *, single: bool, tiles: DecodeTiles) -> CompileReport:
    """A product of an 8B model with fp8 weights, in the shape that the decode step launches."""
    tile = getattr(tiles, f"{'single' if single else 'small'}_{product}")
    (module, kernel), own = SINGLE[product] if single else (DOT, {"HAS_RESIDUAL": product in ("o", "down")})
    blocks = {"K": INNER[product], "BLOCK_N": tile.rows, "BLOCK_K": tile.columns, "HAS_SCALES": True, "PDL": True}
    if not single:
        blocks |= {"BLOCK_M": 16, "STAGES": tile.stages, "PREFETCH": tile.prefetch, "UPCAST": False}
        blocks |= {"GATED": product == "gate_up"}
    signature = SIGNATURES[kernel] | {"w_ptr": "*fp8e4nv"}
    return compile_kernel(
        module,
        kernel,
        arch=90,
        signature=signature,
        constexprs={**own, **blocks},
        divisible_by_16=[name for name, kind in signature.items() if kind.startswith("*")],
        num_warps=tile.warps,
    )


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("product", INNER)
def test_products_of_a_quantised_8b_model_compile_without_spills(product: str, single: bool) -> None:
    report = compiled_product(product, single=single, tiles=FP8_TILES)
    assert report.spill_bytes == 0
    assert report.shared_bytes <= 227 * 1024
