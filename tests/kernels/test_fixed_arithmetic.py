"""Kernels of batch-invariant engines: against their twins, the same bits in every batch, and what they compile to."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PagedCase, paged_case, relative_error
from compiling import ARCHS, compile_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from segue_kernels.attention_reference import paged_attention_reference
from segue_kernels.fixed_product import FixedTile, fixed_product, fixed_product_reference, fixed_tile
from test_decode_attention import compile_decode

from engine.attention.base import AttentionBatch, AttentionShape
from engine.batch_invariant import triton_attention
from engine.batch_invariant.triton_attention import AlignedTritonAttention, aligned_slices, turns_of

SMALL = FixedTile(tokens=16, rows=16, columns=16, warps=2, stages=2)
PLAIN = {"window": None, "soft_cap": None}


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 21, 40), (17, 33, 64), (40, 16, 100)])
def test_product_matches_the_eager_twin(device, dtype, tolerance, rows, outputs, inner):
    x, w = (
        randn(rows, inner, dtype=dtype, device=device, seed=1),
        randn(outputs, inner, dtype=dtype, device=device, seed=2),
    )
    for out_dtype in (None, torch.float32):
        torch.testing.assert_close(
            fixed_product(x, w, out_dtype=out_dtype, tile=SMALL),
            fixed_product_reference(x, w, out_dtype=out_dtype),
            rtol=tolerance,
            atol=tolerance * inner**0.5,
        )


def test_a_row_of_a_product_has_the_same_bits_in_every_batch(device):
    """In the interpreter rows keep their place in a tile: numpy's product depends on it, that of a tensor core does not
    (see the GPU test)."""
    x, w = (randn(rows, 72, dtype=torch.float32, device=device, seed=rows) for rows in (40, 33))
    whole = fixed_product(x, w, tile=SMALL)
    for first, rows in ((0, 1), (32, 1), (16, 2), (0, 17)):
        part = fixed_product(x[first : first + rows].contiguous(), w, tile=SMALL)
        assert torch.equal(part, whole[first : first + rows])


def test_the_tile_follows_from_the_weight_alone():
    assert fixed_tile(6144, torch.bfloat16).rows < fixed_tile(28672, torch.bfloat16).rows
    assert fixed_tile(6144, torch.bfloat16).tokens == fixed_tile(28672, torch.bfloat16).tokens


def backend(case: PagedCase) -> AlignedTritonAttention:
    shape = AttentionShape(
        heads=case.q.shape[1],
        kv_heads=case.kv_pages.shape[3],
        head_dim=case.q.shape[2],
        block_size=case.kv_pages.shape[4],
        dtype=case.q.dtype,
        device=case.q.device,
    )
    return AlignedTritonAttention(shape)


def attended(
    case: PagedCase, rows: list[tuple[int, int, int]], window: int | None = None, soft_cap: float | None = None
) -> list[torch.Tensor]:
    """Of the queries at begin .. end-1 of each (row, begin, end), in one step; `case` has a query for each token."""
    lens = [end for _, _, end in rows]
    counts = [end - begin for _, begin, end in rows]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    offsets = case.query_starts.tolist()
    q = torch.cat([case.q[offsets[row] + begin : offsets[row] + end] for row, begin, end in rows])
    batch = AttentionBatch(
        block_tables=case.block_tables[[row for row, _, _ in rows]],
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=q.device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=q.device),
        max_query=max(counts),
        max_seq=max(lens),
        decode_only=max(counts) == 1,
        seq_lens_host=tuple(lens),
        query_starts_host=tuple(starts),
    )
    attention = backend(case)
    out = attention.forward(attention.plan(batch), 1, q, case.kv_pages, scale=0.3, window=window, soft_cap=soft_cap)
    return list(out.split(counts))


def whole_case(lengths: list[int], device: torch.device, block: int = 16) -> PagedCase:
    return paged_case(lengths, lengths, heads=6, kv_heads=2, dim=16, block=block, dtype=torch.float32, device=device)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits and turns at lengths that the interpreter can do."""
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(triton_attention, "ITEMS_MAX", 5)


@pytest.mark.parametrize("options", [PLAIN, {"window": 70, "soft_cap": None}, {"window": None, "soft_cap": 2.0}])
def test_attention_matches_the_eager_twin(short_splits, device, options):
    case = whole_case([150, 20], device)
    want = paged_attention_reference(
        case.q, case.kv_pages, 1, case.block_tables, case.seq_lens, case.query_starts, scale=0.3, **options
    )
    assert relative_error(torch.cat(attended(case, [(0, 0, 150), (1, 0, 20)], **options)), want) < 2e-6


@pytest.mark.parametrize("options", [PLAIN, {"window": 40, "soft_cap": None}])
def test_a_query_has_the_same_bits_in_chunks_in_decodes_and_in_company(short_splits, device, options):
    case = whole_case([150, 33], device, block=24)
    whole = attended(case, [(0, 0, 150)], **options)[0]
    for begin, end in ((7, 81), (81, 150)):
        chunk, other = attended(case, [(0, begin, end), (1, 5, 33)], **options)
        assert torch.equal(chunk, whole[begin:end])
        assert torch.equal(other, attended(case, [(1, 5, 33)], **options)[0])
    positions = [0, 15, 16, 63, 64, 149]
    decoded = attended(case, [(0, at, at + 1) for at in positions], **options)
    for at, out in zip(positions, decoded, strict=True):
        assert torch.equal(out[0], whole[at])


@given(
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=6),
    queries=st.sampled_from([1, 4, 16, 64]),
)
def test_slices_cover_their_rows_and_cross_no_boundary(rows, queries):
    counts, lengths = [count for count, _ in rows], [count + before for count, before in rows]
    for (count, before), parts in zip(rows, aligned_slices(counts, lengths, queries), strict=True):
        assert sum(parts) == count and min(parts) > 0
        at = before
        for part in parts:
            assert at // queries == (at + part - 1) // queries
            at += part


@settings(max_examples=30)
@given(splits=st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_turns_hold_all_slices_in_bounded_memory(splits):
    turns = turns_of(splits)
    assert [count for turn in turns for count in splits[turn]] == splits
    assert all(sum(splits[turn]) <= triton_attention.ITEMS_MAX or len(splits[turn]) == 1 for turn in turns)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("outputs", "out"), [(6144, "bf16"), (28672, "bf16"), (128256, "fp32")])
def test_product_compiles_without_spills(arch, outputs, out):
    tile = fixed_tile(outputs, torch.bfloat16)
    report = compile_kernel(
        "segue_kernels.fixed_product",
        "fixed_product_kernel",
        arch=arch,
        signature={"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": f"*{out}", "M": "i32"},
        constexprs={
            "N": outputs,
            "K": 4096,
            "BLOCK_M": tile.tokens,
            "BLOCK_N": tile.rows,
            "BLOCK_K": tile.columns,
            "UPCAST": False,
        },
        divisible_by_16=["x_ptr", "w_ptr", "out_ptr"],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    assert report.spill_bytes == 0
    assert report.uses("wgmma.mma_async") == (arch == 90)


@pytest.mark.parametrize("window", [False, True])
def test_aligned_attention_compiles_to_warp_group_products(window):
    report = compile_decode(90, "bf16", 128, 64, torch.bfloat16, queries=16, aligned=True, window=window)
    assert report.spill_bytes == 0
    assert report.uses("wgmma.mma_async")


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inner"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_products_of_a_model_have_the_same_bits_in_every_batch(device, outputs, inner):
    x = torch.randn(2048, inner, device=device).bfloat16()
    w = torch.randn(outputs, inner, device=device).bfloat16() * inner**-0.5
    whole = fixed_product(x, w)
    for rows in (1, 2, 7, 64, 65, 300, 1024):
        assert torch.equal(fixed_product(x[:rows], w), whole[:rows])
        assert torch.equal(fixed_product(x[-rows:], w), whole[-rows:])
    assert relative_error(whole, fixed_product_reference(x, w)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
def test_long_rows_have_the_same_bits_in_chunks_and_decodes(device, window):
    case = paged_case([5000], [5000], heads=32, kv_heads=8, dim=128, block=64, dtype=torch.bfloat16, device=device)
    whole = attended(case, [(0, 0, 5000)], window)[0]
    for begin, end in ((0, 511), (511, 4000), (4000, 5000)):
        assert torch.equal(attended(case, [(0, begin, end)], window)[0], whole[begin:end])
    positions = [*range(4960, 5000), 0, 1023, 1024, 2047]
    for at, out in zip(positions, attended(case, [(0, at, at + 1) for at in positions], window), strict=True):
        assert torch.equal(out[0], whole[at])
