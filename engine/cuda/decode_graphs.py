"""One decode step, from embedding to sampled token, as one CUDA graph for each batch-size bucket.

A step reads `Places` (who is in the batch) and the row tables, and writes K/V pages, the token table, the places'
positions and `results`. Positions advance and tokens are fed back on the device, so replaying a graph again is the next
step. Places beyond the live ones are padding (row -1) and write nowhere. Without `capture` the same kernels are
launched one by one (in Triton's interpreter too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from segue_kernels.decode_state import BatchBuffers, Places, begin_step
from segue_kernels.general_sampling import GeneralSampling
from segue_kernels.programmatic_launch import supports_pdl
from segue_kernels.sampling import SampleScratch, sample

from engine.attention.base import AttentionBatch
from engine.cuda.blas import blas_library, library_for
from engine.cuda.capture import captured
from engine.cuda.fused_decode import BATCH_MAX, FusedDecode, refusal
from engine.cuda.tiles import DecodeTiles, tiles_for
from engine.model import DecoderModel, StepInput
from engine.row_state import RowState

DecodeForward = Callable[[BatchBuffers], torch.Tensor]
"""A filled batch -> logits float32 [batch, vocab_rows]."""


def batch_buckets(batch_max: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 8 to 32, of 16 to 128, of 32 to 256, 320, and multiples of 128 beyond; `batch_max`
    is the last. (An odd multiple of 64 fits no tile: at 448 the products of a layer take 439 us, at 512 only 309.)"""
    sizes = {1, 2, 4, batch_max, *range(8, 33, 8), *range(48, 129, 16), *range(160, 257, 32)}
    sizes.update((320, *range(384, batch_max, 128)))
    return tuple(sorted(size for size in sizes if size <= batch_max))


class DecodeGraphs:
    """Steps over the rows of `state`. One stream uses it; `words` and `results` are its only inputs and outputs."""

    def __init__(
        self,
        model: DecoderModel,
        kv_pages: torch.Tensor,
        state: RowState,
        vocab_size: int,
        general: GeneralSampling,
        buckets: Sequence[int],
        *,
        capture: bool,
        tiles: DecodeTiles | None = None,
    ) -> None:
        device = kv_pages.device
        self.model, self.kv_pages, self.state = model, kv_pages, state
        self.vocab_size, self._general = vocab_size, general
        self.buckets = tuple(buckets)
        self.pdl = supports_pdl(device)
        self._fused: FusedDecode | None = None
        if refusal(model.spec) is None:
            self._fused = FusedDecode(model, kv_pages, tiles or tiles_for(model.parameters), pdl=self.pdl)
        size = self.buckets[-1]
        self.words = torch.full((Places.WORDS, size), -1, dtype=torch.int32, device=device)
        """Places as one block of memory, see `Places.of`; the caller writes it between steps."""
        self.results = torch.full((size,), -1, dtype=torch.int32, device=device)
        """After a step: the sampled token of each place, -1 where the row failed."""
        spec = model.spec
        self._batch = BatchBuffers.allocate(
            size, state.blocks_max, spec.hidden, spec.head_dim, model.parameters.embed.dtype, device
        )
        self._scratch = SampleScratch.allocate(size, vocab_size, device)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if capture:
            self._graphs = captured(self.buckets, self._enqueue)

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows` places."""
        return next(size for size in self.buckets if size >= rows)

    def step(self, bucket: int) -> None:
        """Enqueue one step over the first `bucket` places."""
        graph = self._graphs.get(bucket)
        if graph is None:
            self._enqueue(bucket)
        else:
            graph.replay()

    def _enqueue(self, bucket: int) -> None:
        places = Places.of(self.words[:, :bucket])
        batch = self._batch.first(bucket)
        state, parameters = self.state, self.model.parameters
        begin_step(
            places, state.tokens, state.block_tables, parameters.embed, self.model.ropes[0], batch, state.block_size
        )
        fused = self._fused if bucket <= BATCH_MAX else None
        logits = self._model_forward(batch) if fused is None else fused(batch)
        results = self.results[:bucket]
        sample(
            logits,
            places,
            state.tokens,
            results,
            self._scratch,
            self.vocab_size,
            general=self._general,
            pdl=self.pdl,
        )

    def _model_forward(self, batch: BatchBuffers) -> torch.Tensor:
        size = batch.x.shape[0]
        attention = AttentionBatch(
            block_tables=batch.tables,
            seq_lens=batch.seq_lens,
            query_starts=self._query_starts[: size + 1],
            max_query=1,
            max_seq=self.state.tokens.shape[1],
            decode_only=True,
        )
        step = StepInput(batch.token_ids, batch.positions, batch.slots, None, attention, 0, None)
        with blas_library(library_for(size)):
            return self.model.forward(step, self.kv_pages)
