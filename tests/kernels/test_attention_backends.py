"""The Triton and cuDNN backends behind the engine's protocol: mixed batches, several windows, long chunks."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PagedCase, paged_case, relative_error
from hypothesis import given
from hypothesis import strategies as st
from segue_kernels.attention_reference import paged_attention_reference

from engine.attention import cudnn_backend
from engine.attention.base import AttentionBatch, AttentionShape
from engine.attention.cudnn_backend import CudnnBackend, eager_attend, long_chunks, piece_lengths
from engine.attention.triton_backend import TritonBackend, slice_counts


def batch_of(case: PagedCase, *, on_host: bool, decode_only: bool = False) -> AttentionBatch:
    counts = case.query_starts.diff()
    return AttentionBatch(
        block_tables=case.block_tables,
        seq_lens=case.seq_lens,
        query_starts=case.query_starts,
        max_query=int(counts.max()),
        max_seq=int(case.seq_lens.max()),
        decode_only=decode_only,
        seq_lens_host=tuple(case.seq_lens.tolist()) if on_host else None,
        query_starts_host=tuple(case.query_starts.tolist()) if on_host else None,
    )


def shape_of(case: PagedCase) -> AttentionShape:
    return AttentionShape(
        heads=case.q.shape[1],
        kv_heads=case.kv_pages.shape[3],
        head_dim=case.q.shape[2],
        block_size=case.kv_pages.shape[4],
        dtype=case.q.dtype,
        device=case.q.device,
    )


def reference(case: PagedCase, layer: int, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    return paged_attention_reference(
        case.q,
        case.kv_pages,
        layer,
        case.block_tables,
        case.seq_lens,
        case.query_starts,
        scale=0.2,
        window=window,
        soft_cap=soft_cap,
    )


@pytest.mark.parametrize("on_host", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "queries", [[1, 40, 3, 9], [1, 1, 1, 1], [2, 1, 8, 4], [60, 40, 9, 33]], ids=["mixed", "one", "short", "long"]
)
def test_rows_of_any_length_share_a_step(queries: list[int], on_host: bool, device: torch.device) -> None:
    case = paged_case(
        [70, 40, 33, 90], queries, heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device
    )
    backend = TritonBackend(shape_of(case))
    plan = backend.plan(batch_of(case, on_host=on_host))
    for layer, window in enumerate([None, 20]):
        out = backend.forward(plan, layer, case.q, case.kv_pages, scale=0.2, window=window, soft_cap=None)
        assert relative_error(out, reference(case, layer, window)) < 2e-6


@pytest.mark.parametrize("window", [None, 50])
def test_a_short_chunk_on_a_long_prefix_is_sliced_over_the_device(window: int | None, device: torch.device) -> None:
    case = paged_case(
        [300, 40, 90], [75, 2, 30], heads=2, kv_heads=1, dim=64, block=16, dtype=torch.bfloat16, device=device
    )
    backend = TritonBackend(shape_of(case))
    plan = backend.plan(batch_of(case, on_host=True))
    assert plan.slices is not None and plan.prefill is None
    out = backend.forward(plan, 1, case.q, case.kv_pages, scale=0.2, window=window, soft_cap=None)
    assert relative_error(out, reference(case, 1, window)) < 1e-2


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.sampled_from([(1, 8), (4, 32), (16, 128)]))
def test_slices_are_even_and_never_pass_for_short_rows(counts: list[int], sizes: tuple[int, int]) -> None:
    short, slice_max = sizes
    slices = slice_counts(counts, short, slice_max, 512)
    assert [sum(parts) for parts in slices] == counts
    for count, parts in zip(counts, slices, strict=True):
        if short < count < 512:
            assert all(short < part <= slice_max for part in parts)
            assert max(parts) - min(parts) <= 1
        else:
            assert parts == [count]


def test_decode_only_batch_with_a_soft_cap(device: torch.device) -> None:
    case = paged_case([70, 0, 33], [1, 1, 1], heads=8, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    backend = TritonBackend(shape_of(case))
    plan = backend.plan(batch_of(case, on_host=False, decode_only=True))
    out = backend.forward(plan, 1, case.q, case.kv_pages, scale=0.2, window=None, soft_cap=3.0)
    assert relative_error(out, reference(case, 1, soft_cap=3.0)) < 2e-6


def test_decode_work_is_planned_once_for_each_window(device: torch.device) -> None:
    case = paged_case([70], [1], heads=4, kv_heads=2, dim=64, block=16, dtype=torch.float32, device=device)
    backend = TritonBackend(shape_of(case))
    plan = backend.plan(batch_of(case, on_host=True, decode_only=True))
    for window in (None, 8, None, 8):
        backend.forward(plan, 0, case.q, case.kv_pages, scale=0.2, window=window, soft_cap=None)
    assert list(plan.decode) == [None, 8]


@given(st.integers(0, 400))
def test_prefix_pieces_are_few_lengths_and_add_up(units: int) -> None:
    pieces = piece_lengths(units * 512)
    assert sum(pieces) == units * 512
    assert all(piece in (512, 1024, 2048) or (piece % 4096 == 0 and piece <= 32768) for piece in pieces)
    assert len(pieces) <= 4 + units * 512 // 32768


def test_long_chunks_know_their_place() -> None:
    """The row of 600 queries alone would not gain; it comes along as it has no fewer than the row of 512."""
    chunks = long_chunks((1, 512, 511, 600), (40, 8192, 9000, 1000))
    assert [(c.row, c.first, c.queries, c.prefix) for c in chunks] == [(1, 1, 512, 7680), (3, 1024, 600, 400)]


def test_chunks_of_few_pairs_are_left_to_the_other_kernel() -> None:
    assert long_chunks((1, 1000, 2047), (40, 1000, 2048)) == ()
    assert [chunk.row for chunk in long_chunks((2048, 1000), (2048, 1000))] == [0]


def test_long_chunks_beside_short_rows_equal_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes of 0, under a piece, and over one; the square call's padding on both sides."""
    monkeypatch.setattr(cudnn_backend, "PAIRS_MIN", 0)
    case = paged_case(
        [512, 700, 1300, 40, 60],
        [512, 600, 520, 1, 30],
        heads=2,
        kv_heads=1,
        dim=64,
        block=64,
        dtype=torch.bfloat16,
        device=device,
        layers=1,
    )
    backend = CudnnBackend(shape_of(case), attend=eager_attend)
    plan = backend.plan(batch_of(case, on_host=False))
    assert [chunk.row for chunk in plan.long] == [0, 1, 2]
    out = backend.forward(plan, 0, case.q, case.kv_pages, scale=0.2, window=None, soft_cap=None)
    assert relative_error(out, reference(case, 0)) < 1e-2


@pytest.mark.parametrize("length", [512, 1100])
def test_a_chunk_that_is_alone_equals_the_reference(
    length: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_backend, "PAIRS_MIN", 0)
    case = paged_case(
        [length], [512], heads=2, kv_heads=1, dim=64, block=64, dtype=torch.bfloat16, device=device, layers=1
    )
    backend = CudnnBackend(shape_of(case), attend=None if device.type == "cuda" else eager_attend)
    plan = backend.plan(batch_of(case, on_host=True))
    assert len(plan.long) == 1
    out = backend.forward(plan, 0, case.q, case.kv_pages, scale=0.2, window=None, soft_cap=None)
    assert relative_error(out, reference(case, 0)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_cudnn_equals_the_reference(dim: int, device: torch.device) -> None:
    case = paged_case(
        [1024, 3000, 7000, 40],
        [1024, 700, 2048, 1],
        heads=8,
        kv_heads=2,
        dim=dim,
        block=64,
        dtype=torch.bfloat16,
        device=device,
    )
    backend = CudnnBackend(shape_of(case))
    plan = backend.plan(batch_of(case, on_host=True))
    out = backend.forward(plan, 1, case.q, case.kv_pages, scale=0.2, window=None, soft_cap=None)
    assert relative_error(out, reference(case, 1)) < 1e-2
    out = backend.forward(plan, 1, case.q, case.kv_pages, scale=0.2, window=500, soft_cap=None)
    assert relative_error(out, reference(case, 1, window=500)) < 1e-2
