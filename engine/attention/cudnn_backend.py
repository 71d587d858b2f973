"""Prefill of long chunks by cuDNN's fused attention (torch SDPA); everything else by the Triton kernels.

cuDNN wants contiguous keys and builds an execution plan for every new shape, so a row of `C` queries on a prefix of
`P` cached tokens becomes a few calls of bucketed shapes, merged by their log-sum-exp:

    keys 0 .. P-R-1       unmasked pieces, whose lengths come from a short list (piece_lengths)
    keys P-R .. P+C-1     one causal square call: the queries are preceded by R dummy rows and padded at the end to a
                          multiple of SQUARE_MULTIPLE; under the causal mask no real query sees the padding

where R = P mod PIECE_MIN. Keys are gathered piece by piece, so that the buffer never exceeds one piece.
Measured on an H200 at D 128, bf16: 608 TFLOP/s at 8k, against 430 of the Triton kernel; below 512 queries it loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from segue_kernels.attention_gather import gather_pages, merge_attention
from segue_kernels.prefill_attention import QUERIES_UNBOUNDED

from engine.attention.base import AttentionBatch, AttentionCapabilities, AttentionShape
from engine.attention.triton_backend import TritonBackend, TritonPlan, query_counts

CHUNK_MIN = 512
"""Fewer queries in a row: the Triton kernel (cuDNN takes 0.13 ms for 128 queries whatever their context)."""

PAIRS_MIN = 2048 * 2048
"""Queries of a row times its length below which the Triton kernel is as fast: it takes all rows in one launch, where
cuDNN needs four or more for each."""

PIECE_MIN = 512
PIECE_STEP = 4096
PIECE_MAX = 32768
"""Prefix pieces are PIECE_MAX, a multiple of PIECE_STEP, or a power of two from PIECE_MIN: 11 lengths in all."""

SQUARE_MULTIPLE = 256

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""(q [heads, queries, dim], k and v [kv_heads, keys, dim], causal, scale) -> out like q, lse float32 [heads, queries].
Causal masks count from the first query and the first key."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """One row served by cuDNN: its queries, its place in the block tables, and how much is cached before them."""

    row: int
    first: int
    queries: int
    prefix: int


@dataclass(slots=True)
class CudnnPlan:
    batch: AttentionBatch
    long: tuple[LongChunk, ...]
    rest: TritonPlan
    whole: TritonPlan | None = None
    """The batch without cuDNN, for layers with a window or a soft cap; made when first needed."""


class CudnnBackend:
    name = "cudnn"
    capabilities = AttentionCapabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 80, 96, 128),
    )

    def __init__(self, shape: AttentionShape, attend: Attend | None = None) -> None:
        self.triton = TritonBackend(shape)
        self.attend = attend or cudnn_attend

    def plan(self, batch: AttentionBatch) -> CudnnPlan:
        """Needs the lengths on the host: reads them back where the batch does not carry them."""
        if batch.decode_only:
            return CudnnPlan(batch, (), self.triton.plan(batch))
        counts = query_counts(batch)
        if counts is None:
            counts = tuple(batch.query_starts.diff().tolist())
        lengths = batch.seq_lens_on_host()
        long = long_chunks(counts, lengths)
        shortest = min((chunk.queries for chunk in long), default=QUERIES_UNBOUNDED)
        return CudnnPlan(batch, long, self.triton.plan(batch, queries_below=shortest))

    def forward(
        self,
        plan: CudnnPlan,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if plan.long and (window is not None or soft_cap is not None):
            plan.whole = plan.whole or self.triton.plan(plan.batch)
            rest, long = plan.whole, plan.long[:0]
        else:
            rest, long = plan.rest, plan.long
        if out is None and long and long[0].queries == q.shape[0]:
            return self._attend_chunk(long[0], plan.batch, layer, q, kv_pages, scale)
        out = self.triton.forward(rest, layer, q, kv_pages, scale=scale, window=window, soft_cap=soft_cap, out=out)
        for chunk in long:
            attended = self._attend_chunk(chunk, plan.batch, layer, q, kv_pages, scale)
            out[chunk.first : chunk.first + chunk.queries] = attended
        return out

    def _attend_chunk(
        self,
        chunk: LongChunk,
        batch: AttentionBatch,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """[queries, heads, dim] of one row's chunk."""
        block_table = batch.block_tables[chunk.row]
        lead = chunk.prefix % PIECE_MIN
        side = -(-(lead + chunk.queries) // SQUARE_MULTIPLE) * SQUARE_MULTIPLE
        rows = -(-chunk.queries // SQUARE_MULTIPLE) * SQUARE_MULTIPLE
        queries = _padded(q[chunk.first : chunk.first + chunk.queries], lead, max(side, lead + rows)).transpose(0, 1)
        start = chunk.prefix - lead
        k, v = gather_pages(kv_pages, layer, block_table, start, chunk.prefix + chunk.queries, side)
        result, lse = self.attend(queries[:, :side], k, v, True, scale)
        wanted = slice(lead, lead + chunk.queries)
        result, lse = result[:, wanted], lse[:, wanted]
        begin = 0
        for length in piece_lengths(start):
            k, v = gather_pages(kv_pages, layer, block_table, begin, begin + length, length)
            piece, piece_lse = self.attend(queries[:, lead : lead + rows], k, v, False, scale)
            merge_attention(result, lse, piece[:, : chunk.queries], piece_lse[:, : chunk.queries])
            begin += length
        return result.transpose(0, 1)


def long_chunks(counts: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[LongChunk, ...]:
    """The rows that cuDNN serves, of a ragged batch with `counts` queries and `lengths` tokens a row: those that gain
    by it, and all that have as many queries as the shortest of them (the other kernels choose by queries alone)."""
    worth = [
        count
        for count, length in zip(counts, lengths, strict=True)
        if count >= CHUNK_MIN and count * length >= PAIRS_MIN
    ]
    shortest = min(worth, default=QUERIES_UNBOUNDED)
    chunks, first = [], 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count >= shortest:
            chunks.append(LongChunk(row, first, count, length - count))
        first += count
    return tuple(chunks)


def piece_lengths(tokens: int) -> list[int]:
    """Cut a prefix of `tokens` (a multiple of PIECE_MIN) into pieces of few distinct lengths, longest first."""
    assert tokens % PIECE_MIN == 0
    pieces = [PIECE_MAX] * (tokens // PIECE_MAX)
    rest = tokens % PIECE_MAX
    if rest >= PIECE_STEP:
        pieces.append(rest // PIECE_STEP * PIECE_STEP)
    rest %= PIECE_STEP
    piece = PIECE_STEP // 2
    while piece >= PIECE_MIN:
        if rest & piece:
            pieces.append(piece)
        piece //= 2
    return pieces


def cudnn_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's fused attention with its log-sum-exp; see `Attend`."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale
    )
    return result[0][0], result[1].reshape(q.shape[0], q.shape[1])


def eager_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch twin of `cudnn_attend`."""
    group = q.shape[0] // k.shape[0]
    scores = q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.softmax(scores, -1) @ v.float().repeat_interleave(group, 0)
    return out.to(q.dtype), torch.logsumexp(scores, -1)


def _padded(q: torch.Tensor, lead: int, rows: int) -> torch.Tensor:
    """q [queries, heads, dim] with `lead` zero rows before it and as many after it as make `rows`."""
    if lead == 0 and rows == q.shape[0]:
        return q
    return torch.nn.functional.pad(q, (0, 0, 0, 0, lead, rows - lead - q.shape[0]))
