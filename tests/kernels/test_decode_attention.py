"""The split-KV decode kernel against its eager twin, in the interpreter or on the GPU, and what it compiles to."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PagedCase, attention_signature, paged_case, relative_error
from compiling import ARCHS, CompileReport, compile_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from segue_kernels.attention_plan import plan_decode_work
from segue_kernels.attention_reference import paged_attention_reference
from segue_kernels.decode_attention import DecodeTiling, decode_attention, decode_tiling, plan_decode

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error in norm: float32 sums in another order; bf16 weights and results are rounded to 8 bits."""


def decode_error(
    case: PagedCase,
    *,
    queries_max: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    layer: int = 1,
    tiling: DecodeTiling | None = None,
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
    plan = plan_decode(
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        heads=case.q.shape[1],
        kv_heads=case.kv_pages.shape[3],
        head_dim=case.q.shape[2],
        kv_dtype=case.kv_pages.dtype,
        queries_max=queries_max,
        window=window,
        tiling=tiling,
    )
    out = torch.full_like(case.q, float("nan"))
    decode_attention(plan, layer, case.q, case.kv_pages, out, scale=scale, soft_cap=soft_cap, kv_scales=case.kv_scales)
    return relative_error(out, want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = paged_case([1, 70, 261], [1, 1, 1], heads=6, kv_heads=2, dim=dim, block=16, dtype=dtype, device=device)
    assert decode_error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize("block", [1, 16, 24, 64, 128])
def test_page_sizes(block: int, device: torch.device) -> None:
    case = paged_case(
        [63, 64, 65, 200], [1] * 4, heads=4, kv_heads=1, dim=64, block=block, dtype=torch.float32, device=device
    )
    assert decode_error(case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [1, 15, 64, 1000])
def test_window(window: int, device: torch.device) -> None:
    case = paged_case([3, 64, 300], [1] * 3, heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    assert decode_error(case, window=window) < TOLERANCE[torch.float32]


def test_soft_cap(device: torch.device) -> None:
    case = paged_case([90, 7], [1, 1], heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    assert decode_error(case, soft_cap=0.5) < TOLERANCE[torch.float32]


def test_several_queries_per_row_are_causal_among_themselves(device: torch.device) -> None:
    case = paged_case(
        [5, 130, 64, 3], [5, 2, 1, 3], heads=6, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device
    )
    assert decode_error(case, queries_max=5) < TOLERANCE[torch.float32]


def test_slices_on_a_long_prefix_see_all_of_it_and_their_own_past(device: torch.device) -> None:
    """Splits before, across and behind the row's first query; rows whose length is no multiple of a tile."""
    case = paged_case(
        [150, 97, 64, 33], [16, 16, 7, 16], heads=8, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device
    )
    tiling = DecodeTiling(tile=16, num_warps=4, num_stages=3, programs_per_sm=8, chunk_one_wave_max=32)
    assert decode_error(case, queries_max=16, tiling=tiling) < TOLERANCE[torch.float32]
    assert decode_error(case, queries_max=16, soft_cap=0.7, tiling=tiling) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("heads", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_many_rows_are_merged_in_blocks_of_heads(heads: int, device: torch.device) -> None:
    """More rows than `combine_blocks` takes for few, fewer and more heads than a block, with one to seven splits."""
    lengths = [1, 15, 16, 17, 33, 100, 112, *range(20, 32)]
    case = paged_case(
        lengths, [1] * len(lengths), heads=heads, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device
    )
    assert len(lengths) > 16
    tiling = DecodeTiling(tile=16, num_warps=2, num_stages=3, programs_per_sm=64, chunk_one_wave_max=16)
    assert decode_error(case, tiling=tiling) < TOLERANCE[torch.float32]


def test_several_queries_with_a_window_shorter_than_a_split(device: torch.device) -> None:
    case = paged_case([300, 130], [4, 3], heads=4, kv_heads=2, dim=64, block=24, dtype=torch.float32, device=device)
    tiling = DecodeTiling(tile=16, num_warps=2, num_stages=3)
    assert decode_error(case, queries_max=4, window=2, tiling=tiling) < TOLERANCE[torch.float32]


def test_fp8_pages_with_scales(device: torch.device) -> None:
    case = paged_case(
        [90, 200],
        [1, 1],
        heads=4,
        kv_heads=2,
        dim=128,
        block=64,
        dtype=torch.bfloat16,
        device=device,
        kv_dtype=torch.float8_e4m3fn,
    )
    assert decode_error(case) < TOLERANCE[torch.bfloat16]


def test_padding_rows_give_zeros_and_longer_rows_are_left_alone(device: torch.device) -> None:
    case = paged_case([40, 0, 50], [1, 1, 9], heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    plan = plan_decode(
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        heads=4,
        kv_heads=2,
        head_dim=64,
        kv_dtype=torch.float32,
    )
    out = torch.full_like(case.q, 7.0)
    decode_attention(plan, 0, case.q, case.kv_pages, out, scale=1.0)
    assert (out[1] == 0).all()
    assert (out[2:] == 7).all()
    assert (out[0] != 7).any()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9),
    tile=st.sampled_from([16, 64]),
    window=st.sampled_from([None, 1, 100]),
    programs_per_sm=st.sampled_from([1, 16]),
)
def test_work_list_covers_every_visible_token_once(
    lengths: list[int], tile: int, window: int | None, programs_per_sm: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = plan_decode_work(
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        kv_heads=2,
        tile=tile,
        queries_above=0,
        queries_max=1,
        window=window,
        programs_per_sm=programs_per_sm,
        chunk_one_wave_max=256,
    )
    items, rows = work.items.tolist(), work.rows.tolist()
    used = [item for item in items if item[0] >= 0]
    assert items[: len(used)] == used
    for row, length in enumerate(lengths):
        first, splits = rows[row]
        mine = items[first : first + splits]
        assert mine == [item for item in used if item[0] == row]
        if length == 0:
            assert splits == 0
            continue
        assert all(item[3:7] == [splits, length, row, 1] and item[1] < item[2] for item in mine)
        assert mine[0][1] == (0 if window is None else max(0, length - window) // tile * tile)
        assert [item[1] for item in mine[1:]] == [item[2] for item in mine[:-1]]
        assert mine[-1][2] == length
        assert all(item[1] % tile == 0 for item in mine)


def test_too_many_packed_queries_are_refused(device: torch.device) -> None:
    one = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="exceed one tile: 128"):
        plan_decode(
            one[None], one, torch.arange(2, device=device), heads=32, kv_heads=1, head_dim=64,
            kv_dtype=torch.float32, queries_max=5,
        )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "pdl", "window"), [(64, False, False), (16, False, True), (64, True, False)])
def test_compiles_without_spills(arch: int, page: int, pdl: bool, window: bool) -> None:
    if pdl and arch < 90:
        pytest.skip("PDL needs compute capability 9.0")
    report = compile_decode(arch, "bf16", 128, page, torch.bfloat16, pdl=pdl, window=window)
    assert report.spill_bytes == 0
    assert report.shared_bytes <= 112 * 1024, "two programs must fit in one multiprocessor of 228 KiB"
    assert report.uses("griddepcontrol.wait") == pdl


@pytest.mark.parametrize(
    ("kv_type", "dtype", "dim"),
    [
        ("fp8e4nv", torch.float8_e4m3fn, 128),
        ("bf16", torch.bfloat16, 256),
        ("bf16", torch.bfloat16, 80),
        ("fp32", torch.float32, 64),
    ],
)
def test_other_shapes_compile_without_spills(kv_type: str, dtype: torch.dtype, dim: int) -> None:
    assert compile_decode(90, kv_type, dim, 64, dtype).spill_bytes == 0


@pytest.mark.parametrize("queries", [16, 32])
def test_slices_of_many_queries_compile_to_warp_group_products(queries: int) -> None:
    report = compile_decode(90, "bf16", 128, 64, torch.bfloat16, queries=queries)
    assert report.spill_bytes == 0
    assert report.uses("wgmma.mma_async")


def compile_decode(
    arch: int,
    kv_type: str,
    dim: int,
    page: int,
    dtype: torch.dtype,
    *,
    pdl: bool = False,
    window: bool = False,
    queries: int = 1,
    aligned: bool = False,
) -> CompileReport:
    packed = max(16, 4 * queries)
    tiling = decode_tiling(dim, dtype, packed=packed)
    signature, divisible = attention_signature(kv_type, extra={"partial": "*fp32", "lse": "*fp32"})
    return compile_kernel(
        "segue_kernels.decode_attention",
        "decode_attention_kernel",
        arch=arch,
        signature=signature,
        constexprs={
            "STRIDE_TOKEN": dim,
            "GROUP": 4,
            "QUERIES_MAX": queries,
            "BLOCK_M": packed,
            "HEAD_DIM": dim,
            "DIM_BLOCK": 1 << (dim - 1).bit_length(),
            "PAGE": page,
            "TILE": tiling.tile,
            "HAS_WINDOW": window,
            "HAS_CAP": window,
            "HAS_SCALES": kv_type == "fp8e4nv",
            "UPCAST": False,
            "ALIGNED": aligned,
            "PDL": pdl,
        },
        divisible_by_16=divisible,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@pytest.mark.gpu
def test_graph_replay_follows_growing_lengths(device: torch.device) -> None:
    case = paged_case(
        [4000, 900, 64], [1] * 3, heads=8, kv_heads=2, dim=128, block=16, dtype=torch.bfloat16, device=device
    )
    full = case.seq_lens.clone()
    case.seq_lens.fill_(1)
    out = torch.zeros_like(case.q)

    def step() -> None:
        plan = plan_decode(
            case.block_tables,
            case.seq_lens,
            case.query_starts,
            heads=8,
            kv_heads=2,
            head_dim=128,
            kv_dtype=torch.bfloat16,
        )
        for _ in range(3):
            decode_attention(plan, 1, case.q, case.kv_pages, out, scale=0.1, pdl=_has_pdl())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for fraction in (0.01, 0.5, 1.0):
        case.seq_lens.copy_((full * fraction).int().clamp(min=1))
        out.fill_(float("nan"))
        graph.replay()
        want = paged_attention_reference(
            case.q, case.kv_pages, 1, case.block_tables, case.seq_lens, case.query_starts, scale=0.1
        )
        assert relative_error(out, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_last_pages_of_a_pool_beyond_32_bits(device: torch.device) -> None:
    shape = (1200, 32, 2, 8, 64, 64)
    assert torch.Size(shape).numel() > 2**31
    kv = torch.empty(shape, dtype=torch.bfloat16, device=device)
    kv[-8:].normal_()
    case = PagedCase(
        q=torch.randn(2, 32, 64, device=device, dtype=torch.bfloat16),
        kv_pages=kv,
        kv_scales=None,
        block_tables=torch.tensor([[1199, 1192, 1195], [1198, 1193, 0]], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([150, 128], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
    )
    assert decode_error(case, layer=31) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_large_batches(seed: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5000, (40,), generator=random).tolist()
    queries = [min(length, 1 + (row + seed) % 4) for row, length in enumerate(lengths)]
    case = paged_case(
        lengths,
        queries,
        heads=32,
        kv_heads=8,
        dim=128,
        block=[16, 64, 48][seed % 3],
        dtype=torch.bfloat16,
        device=device,
        seed=seed,
        kv_dtype=torch.float8_e4m3fn if seed % 2 else None,
    )
    window = None if seed < 3 else 700
    soft_cap = 20.0 if seed == 4 else None
    assert decode_error(case, queries_max=4, window=window, soft_cap=soft_cap) < TOLERANCE[torch.bfloat16]


def _has_pdl() -> bool:
    return torch.cuda.get_device_capability()[0] >= 9
