"""Steps with prefill chunks as CUDA graphs, for small steps: launching their kernels one by one takes the host longer
than running them takes the device.

A graph has a shape (chunk tokens, decodes). Chunk tokens stand first, padded to the bucket, then the decodes, padded
likewise; at most CHUNKS_MAX rows bring chunks. All lengths are read on the device, so one graph serves every mix that
fits. Padding tokens belong to row -1: they write no K/V and nothing reads them.

Attention of small chunks: the host cuts them into slices of a few queries, each a row of its own to the split-KV decode
kernel, which spreads a long cached prefix over the whole GPU. Larger chunks go to the prefill kernel uncut.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from segue_kernels.decode_state import Places
from segue_kernels.general_sampling import GeneralSampling
from segue_kernels.programmatic_launch import supports_pdl
from segue_kernels.sampling import SampleScratch, sample

from engine.attention.base import AttentionBatch
from engine.cuda.blas import blas_library, library_for
from engine.cuda.capture import captured
from engine.cuda.slice_attention import SliceAttention, slice_queries
from engine.model import DecoderModel, StepInput
from engine.row_state import RowState
from segue.plan import Chunk

CHUNKS_MAX = 8
TOKEN_BUCKETS = (64, 128, 256, 512, 1024)
"""From about a thousand tokens on the device takes longer than the host."""

DECODE_BUCKETS = (0, 32, 256)

EAGER_MIN, PADDED_MAX = 640, 1.2
"""A step of so many tokens takes the device as long as launching it takes the host: from there on no graph that would
compute so many times the step's tokens."""

SLICED_TOKENS_MAX = 256
"""Steps of up to this many chunk tokens are cut into slices."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """`tokens` of chunks and `decodes`, both padded."""

    tokens: int
    decodes: int

    @property
    def places(self) -> int:
        return CHUNKS_MAX + self.decodes


class StepWords:
    """Where a step's inputs lie in one block of int32, so that one copy brings them to the device."""

    def __init__(self, tokens_max: int, decodes_max: int, slices_max: int) -> None:
        line = tokens_max + decodes_max
        self.places_max, self.slices_max = CHUNKS_MAX + decodes_max, slices_max
        sizes = {
            "token_rows": line,
            "token_positions": line,
            "slice_rows": slices_max,
            "slice_lens": slices_max,
            "slice_starts": slices_max + 1,
            "chunk_last": CHUNKS_MAX,
            "places": Places.WORDS * self.places_max,
        }
        self.spans: dict[str, slice] = {}
        begin = 0
        for name, size in sizes.items():
            self.spans[name] = slice(begin, begin + size)
            begin += size
        self.total = begin


def step_shapes(tokens_max: int, decodes_max: int) -> tuple[StepShape, ...]:
    """Every shape up to a step's token budget and the number of rows."""
    decode_sizes = sorted({min(size, decodes_max) for size in (*DECODE_BUCKETS, decodes_max)})
    token_sizes = [size for size in TOKEN_BUCKETS if size <= tokens_max] or [tokens_max]
    return tuple(StepShape(tokens, decodes) for tokens in token_sizes for decodes in decode_sizes)


class ChunkGraphs:
    """Steps of chunks and decodes over the rows of `state`; `words` is the input, `results` the output."""

    def __init__(
        self,
        model: DecoderModel,
        kv_pages: torch.Tensor,
        state: RowState,
        vocab_size: int,
        general: GeneralSampling,
        shapes: Sequence[StepShape],
        *,
        capture: bool,
    ) -> None:
        device = kv_pages.device
        self._slice_queries = slice_queries(model.heads, kv_pages.shape[3])
        self._sliced, self._whole = copy.copy(model), copy.copy(model)
        self._sliced.prefill_backend = SliceAttention(model.heads, kv_pages.shape[3])
        self._whole.prefill_backend = model.decode_backend
        self._kv_pages, self._state, self._vocab_size, self._general = kv_pages, state, vocab_size, general
        self.shapes = tuple(sorted(shapes, key=lambda shape: shape.tokens + shape.decodes))
        tokens_max = max(shape.tokens for shape in shapes)
        decodes_max = max(shape.decodes for shape in shapes)
        slices_max = CHUNKS_MAX + SLICED_TOKENS_MAX // self._slice_queries + 1
        self.layout = StepWords(tokens_max, decodes_max, slices_max)
        self.words = torch.zeros(self.layout.total, dtype=torch.int32, device=device)
        self._clear()
        self.results = torch.full((self.layout.places_max,), -1, dtype=torch.int32, device=device)
        """The token of each place: chunks, padded to CHUNKS_MAX, then decodes."""
        self._scratch = SampleScratch.allocate(self.layout.places_max, vocab_size, device)
        self._decode_starts = torch.arange(decodes_max + 1, dtype=torch.int32, device=device)
        self._pdl = supports_pdl(device)
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        if capture:
            self._graphs = captured(self.shapes, self._enqueue)

    def shape(self, tokens: int, chunks: int, decodes: int) -> StepShape | None:
        """The smallest shape that holds a step, or None where there is none or launching is faster than its padding."""
        if chunks > CHUNKS_MAX:
            return None
        shape = next((s for s in self.shapes if s.tokens >= tokens and s.decodes >= decodes), None)
        real = tokens + decodes
        if shape is not None and real >= EAGER_MIN and shape.tokens + shape.decodes > PADDED_MAX * real:
            return None
        return shape

    def step(self, shape: StepShape) -> None:
        """Enqueue the step that `words` describes."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._enqueue(shape)
        else:
            graph.replay()

    def fill(
        self,
        words: npt.NDArray[np.int32],
        shape: StepShape,
        chunks: Sequence[Chunk],
        decodes: Sequence[int],
        decode_positions: Sequence[int],
    ) -> npt.NDArray[np.int32]:
        """Write a step into a host block of `layout.total` words. Returns its places int32 [5, shape.places], all
        padding, for the caller to fill: chunks from 0 on, decodes from CHUNKS_MAX on."""
        spans = self.layout.spans
        rows, positions = words[spans["token_rows"]], words[spans["token_positions"]]
        rows[: shape.tokens + shape.decodes] = -1
        positions[: shape.tokens + shape.decodes] = 0
        slice_rows, lens, starts = (words[spans[name]] for name in ("slice_rows", "slice_lens", "slice_starts"))
        slice_rows[:], lens[:] = 0, 0
        words[spans["chunk_last"]] = 0  # places without a chunk: any token of this shape
        begin = index = 0
        for place, chunk in enumerate(chunks):
            rows[begin : begin + chunk.length] = chunk.row
            positions[begin : begin + chunk.length] = np.arange(chunk.start, chunk.start + chunk.length)
            for length in self._cut(shape, chunk.length):
                begin += length
                slice_rows[index], starts[index] = chunk.row, begin - length
                lens[index] = positions[begin - 1] + 1
                index += 1
            words[spans["chunk_last"]][place] = begin - 1
        starts[index:] = begin
        rows[shape.tokens : shape.tokens + len(decodes)] = decodes
        positions[shape.tokens : shape.tokens + len(decodes)] = decode_positions
        places = words[spans["places"]].reshape(Places.WORDS, -1)[:, : shape.places]
        places[0] = -1
        return places

    def _cut(self, shape: StepShape, length: int) -> list[int]:
        """Even slices of a chunk, or the whole of it."""
        parts = -(-length // self._slice_queries) if shape.tokens <= SLICED_TOKENS_MAX else 1
        return [length * (part + 1) // parts - length * part // parts for part in range(parts)]

    def _clear(self) -> None:
        """All padding: what a capture runs on."""
        self.words[self.layout.spans["token_rows"]] = -1
        self.words[self.layout.spans["places"]] = -1

    def _part(self, name: str) -> torch.Tensor:
        return self.words[self.layout.spans[name]]

    def _enqueue(self, shape: StepShape) -> None:
        state, count = self._state, shape.tokens + shape.decodes
        rows, positions = self._part("token_rows")[:count], self._part("token_positions")[:count].long()
        known = rows.clamp(min=0).long()
        pages = state.block_tables[known, positions // state.block_size].long()
        slots = pages * state.block_size + positions % state.block_size
        decode_places = torch.arange(shape.tokens, count, device=rows.device)
        step = StepInput(
            token_ids=state.tokens[known, positions],
            positions=positions,
            slots=torch.where(rows >= 0, slots, -1),
            prefill=self._chunk_attention(shape),
            decode=self._decode_attention(shape, rows, positions) if shape.decodes else None,
            prefill_tokens=shape.tokens,
            sampled=torch.cat((self._part("chunk_last").long(), decode_places)),
        )
        sliced = shape.tokens <= SLICED_TOKENS_MAX
        model = self._sliced if sliced else self._whole
        with blas_library(library_for(count)):
            logits = model.forward(step, self._kv_pages)
        places = Places.of(self._part("places").view(Places.WORDS, -1)[:, : shape.places])
        results = self.results[: shape.places]
        sample(
            logits,
            places,
            state.tokens,
            results,
            self._scratch,
            self._vocab_size,
            general=self._general,
            pdl=self._pdl,
        )

    def _chunk_attention(self, shape: StepShape) -> AttentionBatch:
        sliced = shape.tokens <= SLICED_TOKENS_MAX
        rows = self.layout.slices_max if sliced else CHUNKS_MAX
        return AttentionBatch(
            block_tables=self._state.block_tables[self._part("slice_rows")[:rows].long()],
            seq_lens=self._part("slice_lens")[:rows],
            query_starts=self._part("slice_starts")[: rows + 1],
            max_query=min(self._slice_queries, shape.tokens) if sliced else shape.tokens,
            max_seq=self._state.tokens.shape[1],
            max_tokens=shape.tokens,
            decode_only=False,
        )

    def _decode_attention(self, shape: StepShape, rows: torch.Tensor, positions: torch.Tensor) -> AttentionBatch:
        decode_rows, at = rows[shape.tokens :], positions[shape.tokens :]
        return AttentionBatch(
            block_tables=self._state.block_tables[decode_rows.clamp(min=0).long()],
            seq_lens=torch.where(decode_rows >= 0, at + 1, 0).int(),
            query_starts=self._decode_starts[: shape.decodes + 1],
            max_query=1,
            max_seq=self._state.tokens.shape[1],
            decode_only=True,
        )
