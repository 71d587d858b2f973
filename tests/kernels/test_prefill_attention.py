"""The paged prefill kernel against its eager twin, in the interpreter or on the GPU, and what it compiles to."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PagedCase, attention_signature, paged_case, relative_error
from compiling import compile_kernel
from segue_kernels.attention_reference import paged_attention_reference
from segue_kernels.prefill_attention import PrefillTiling, plan_prefill, prefill_attention, prefill_tiling

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error in norm; see the decode tests."""

SMALL = PrefillTiling(block_m=16, tile=16, num_warps=2, num_stages=2)
"""Small blocks: short rows already have full tiles, a diagonal and several blocks."""


def prefill_error(
    case: PagedCase,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    layer: int = 1,
    tiling: PrefillTiling | None = None,
    counts_on_host: bool = False,
) -> float:
    scale = case.q.shape[-1] ** -0.5
    want = paged_attention_reference(
        case.q,
        case.kv_pages,
        layer,
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        kv_scales=case.kv_scales,
    )
    counts = tuple(case.query_starts.diff().tolist())
    plan = plan_prefill(
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        head_dim=case.q.shape[2],
        q_dtype=case.q.dtype,
        max_query=max(counts),
        query_counts=counts if counts_on_host else None,
        tiling=tiling,
    )
    out = torch.full_like(case.q, float("nan"))
    prefill_attention(
        plan,
        layer,
        case.q,
        case.kv_pages,
        out,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        kv_scales=case.kv_scales,
    )
    return relative_error(out, want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = paged_case([70, 33], [37, 33], heads=2, kv_heads=1, dim=dim, block=16, dtype=dtype, device=device)
    assert prefill_error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize("block", [1, 16, 24, 64])
@pytest.mark.parametrize("counts_on_host", [pytest.param(False, marks=pytest.mark.slow), True])
def test_page_sizes_and_ragged_rows(block: int, counts_on_host: bool, device: torch.device) -> None:
    case = paged_case(
        [16, 65, 90, 1],
        [16, 50, 3, 1],
        heads=4,
        kv_heads=2,
        dim=64,
        block=block,
        dtype=torch.float32,
        device=device,
    )
    assert prefill_error(case, tiling=SMALL, counts_on_host=counts_on_host) < TOLERANCE[torch.float32]


def test_default_tiling_on_a_cached_prefix(device: torch.device) -> None:
    case = paged_case(
        [300, 140], [150, 140], heads=2, kv_heads=1, dim=64, block=64, dtype=torch.bfloat16, device=device
    )
    assert prefill_error(case) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 15, 16, 40, 1000])
def test_window(window: int, device: torch.device) -> None:
    case = paged_case([90, 50], [45, 50], heads=2, kv_heads=1, dim=64, block=16, dtype=torch.float32, device=device)
    assert prefill_error(case, window=window, tiling=SMALL) < TOLERANCE[torch.float32]


def test_soft_cap(device: torch.device) -> None:
    case = paged_case([60, 7], [33, 7], heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    assert prefill_error(case, soft_cap=0.5, tiling=SMALL) < TOLERANCE[torch.float32]


def test_fp8_pages_with_scales(device: torch.device) -> None:
    case = paged_case(
        [100, 64],
        [40, 64],
        heads=4,
        kv_heads=2,
        dim=64,
        block=64,
        dtype=torch.bfloat16,
        device=device,
        kv_dtype=torch.float8_e4m3fn,
    )
    assert prefill_error(case) < TOLERANCE[torch.bfloat16]


def test_only_rows_between_the_bounds_are_served(device: torch.device) -> None:
    case = paged_case(
        [40, 30, 50], [4, 20, 50], heads=2, kv_heads=1, dim=64, block=16, dtype=torch.float32, device=device
    )
    plan = plan_prefill(
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        head_dim=64,
        q_dtype=torch.float32,
        max_query=50,
        queries_above=4,
        queries_below=50,
        tiling=SMALL,
    )
    out = torch.full_like(case.q, 7.0)
    prefill_attention(plan, 0, case.q, case.kv_pages, out, scale=1.0)
    assert (out[:4] == 7).all()
    assert (out[4:24] != 7).any(-1).all()
    assert (out[24:] == 7).all()


def test_longest_blocks_of_a_row_come_first(device: torch.device) -> None:
    case = paged_case([40, 5], [40, 5], heads=2, kv_heads=1, dim=64, block=16, dtype=torch.float32, device=device)
    plan = plan_prefill(
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        head_dim=64,
        q_dtype=torch.float32,
        max_query=40,
        tiling=SMALL,
    )
    assert plan.items[:, 0].tolist() == [0, 0, 0, 1, -1, -1]
    assert plan.items[:4, 1].tolist() == [32, 16, 0, 0]


@pytest.mark.parametrize(
    ("arch", "kv_type", "dim", "spill_bytes_max"),
    [
        (80, "bf16", 128, 16),
        (90, "bf16", 128, 0),
        (100, "bf16", 128, 16),
        (90, "bf16", 64, 0),
        (90, "bf16", 256, 0),
        (90, "fp32", 128, 0),
        (90, "fp8e4nv", 128, 0),
    ],
)
def test_compiles(arch: int, kv_type: str, dim: int, spill_bytes_max: int) -> None:
    q_type = "fp32" if kv_type == "fp32" else "bf16"
    tiling = prefill_tiling(dim, {"fp32": torch.float32, "bf16": torch.bfloat16}[q_type])
    signature, aligned = attention_signature(kv_type, q_type=q_type, extra={"seq_lens": "*i32", "query_starts": "*i32"})
    report = compile_kernel(
        "segue_kernels.prefill_attention",
        "prefill_attention_kernel",
        arch=arch,
        signature=signature,
        constexprs={
            "STRIDE_TOKEN": dim,
            "GROUP": 4,
            "BLOCK_M": tiling.block_m,
            "HEAD_DIM": dim,
            "DIM_BLOCK": dim,
            "PAGE": 64,
            "TILE": tiling.tile,
            "HAS_WINDOW": False,
            "HAS_CAP": False,
            "HAS_SCALES": kv_type == "fp8e4nv",
            "UPCAST": False,
            "PDL": arch >= 90,
        },
        divisible_by_16=aligned,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    assert report.spill_bytes <= spill_bytes_max
    if arch == 90 and q_type == "bf16":
        assert report.uses("wgmma.mma_async")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("window", [None, 300])
def test_large_ragged_batches(dim: int, block: int, window: int | None, device: torch.device) -> None:
    case = paged_case(
        [1500, 700, 3000, 129],
        [1500, 333, 600, 2],
        heads=8,
        kv_heads=2,
        dim=dim,
        block=block,
        dtype=torch.bfloat16,
        device=device,
    )
    assert prefill_error(case, window=window) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_last_pages_of_a_pool_beyond_32_bits(device: torch.device) -> None:
    kv = torch.empty(1200, 32, 2, 8, 64, 64, dtype=torch.bfloat16, device=device)
    kv[-8:].normal_()
    case = PagedCase(
        q=torch.randn(140, 32, 64, device=device, dtype=torch.bfloat16),
        kv_pages=kv,
        kv_scales=None,
        block_tables=torch.tensor([[1199, 1192, 1195]], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([180], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 140], dtype=torch.int32, device=device),
    )
    assert prefill_error(case, layer=31) < TOLERANCE[torch.bfloat16]
