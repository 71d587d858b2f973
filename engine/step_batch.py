"""The ragged batch of one step, made from chunks and decodes with a single host-to-device transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionBatch
from engine.model import StepInput
from engine.row_state import RowState
from engine.upload import upload
from segue.errors import InternalError
from segue.plan import Chunk

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model computes and which rows sample: sampling chunks in plan order, then decodes."""

    model_input: StepInput
    rows_sampled: tuple[int, ...]
    positions_sampled: tuple[int, ...]
    """Where the new tokens will stand."""
    rows_device: torch.Tensor
    positions_device: torch.Tensor


def build_step(state: RowState, chunks: Sequence[Chunk], decodes: Sequence[int]) -> StepBatch:
    """InternalError when a chunk reaches past the row's known tokens or pages."""
    for chunk in chunks:
        check_chunk(state, chunk)
    known = [state.tokens_known[row] for row in decodes]
    for row, length in zip(decodes, known, strict=True):
        state.seq(row)
        state.check_pages(row, length)
    prefill_starts = np.cumsum([0] + [chunk.length for chunk in chunks], dtype=np.int64)
    prefill_tokens = int(prefill_starts[-1])
    ends = [(index, chunk) for index, chunk in enumerate(chunks) if chunk.sample]
    rows_sampled = [chunk.row for _, chunk in ends] + list(decodes)
    positions_sampled = [chunk.start + chunk.length for _, chunk in ends] + known
    sampled = [int(prefill_starts[index + 1]) - 1 for index, _ in ends]
    sampled += range(prefill_tokens, prefill_tokens + len(decodes))
    parts = _upload_joined(
        state.device,
        np.concatenate([np.full(chunk.length, chunk.row, dtype=np.int64) for chunk in chunks] + [_ints(decodes)]),
        np.concatenate(
            [np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int64) for chunk in chunks]
            + [_ints(known) - 1]
        ),
        _ints([chunk.row for chunk in chunks]),
        _ints([chunk.start + chunk.length for chunk in chunks]),
        prefill_starts,
        _ints(known),
        np.arange(len(decodes) + 1, dtype=np.int64),
        _ints(sampled),
        _ints(rows_sampled),
        _ints(positions_sampled),
    )
    token_rows, positions, chunk_rows, chunk_lens, chunk_starts, decode_lens, decode_starts = parts[:7]
    pages = state.block_tables[token_rows, positions // state.block_size].long()
    model_input = StepInput(
        token_ids=state.tokens[token_rows, positions],
        positions=positions,
        slots=pages * state.block_size + positions % state.block_size,
        prefill=_prefill_batch(state, chunks, chunk_rows, chunk_lens, chunk_starts) if chunks else None,
        decode=_decode_batch(state, known, token_rows[prefill_tokens:], decode_lens, decode_starts)
        if decodes
        else None,
        prefill_tokens=prefill_tokens,
        sampled=parts[7] if chunks else None,
    )
    return StepBatch(model_input, tuple(rows_sampled), tuple(positions_sampled), parts[8], parts[9])


def check_chunk(state: RowState, chunk: Chunk) -> None:
    """InternalError when a chunk reaches past the row's known tokens or pages."""
    end, known = chunk.start + chunk.length, state.tokens_known[chunk.row]
    seq = state.seq(chunk.row)
    if chunk.length < 1 or end > known or (chunk.sample and end != known):
        raise InternalError(f"sequence {seq} with {known} tokens cannot run {chunk}")
    state.check_pages(chunk.row, end)


def _ints(values: Sequence[int]) -> _Ints:
    return np.array(values, dtype=np.int64)


def _upload_joined(device: torch.device, *arrays: _Ints) -> tuple[torch.Tensor, ...]:
    """The arrays on the device, in one transfer."""
    return torch.split(upload(np.concatenate(arrays), device), [len(array) for array in arrays])


def _prefill_batch(
    state: RowState, chunks: Sequence[Chunk], rows: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor
) -> AttentionBatch:
    lens_host = tuple(chunk.start + chunk.length for chunk in chunks)
    starts_host = [0]
    for chunk in chunks:
        starts_host.append(starts_host[-1] + chunk.length)
    return AttentionBatch(
        block_tables=state.block_tables[rows, : -(-max(lens_host) // state.block_size)],
        seq_lens=lens.int(),
        query_starts=starts.int(),
        max_query=max(chunk.length for chunk in chunks),
        max_seq=max(lens_host),
        decode_only=False,
        seq_lens_host=lens_host,
        query_starts_host=tuple(starts_host),
    )


def _decode_batch(
    state: RowState, lens_host: list[int], rows: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor
) -> AttentionBatch:
    return AttentionBatch(
        block_tables=state.block_tables[rows, : -(-max(lens_host) // state.block_size)],
        seq_lens=lens.int(),
        query_starts=starts.int(),
        max_query=1,
        max_seq=max(lens_host),
        decode_only=True,
        seq_lens_host=tuple(lens_host),
        query_starts_host=tuple(range(len(lens_host) + 1)),
    )
