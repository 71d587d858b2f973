"""What the GPU path takes beside weights, rows and pages, for the memory ledger; nothing is allocated here.

Checked against torch's own counters and the driver's on an H200 (`tests/engine_cuda/test_memory_gpu.py`).
"""

from __future__ import annotations

import torch
from segue_kernels.decode_state import BatchBuffers, Places
from segue_kernels.general_sampling import GeneralScratch
from segue_kernels.logprob_report import REPORT_WORDS
from segue_kernels.row_sampling import ROW_WORDS

from engine.arch import ArchSpec
from engine.attention import cudnn_backend
from engine.batch_invariant import triton_attention
from engine.cuda.chunk_graphs import StepShape, step_shapes
from engine.memory_ledger import MIB, LedgerLine, activation_bytes, logits_bytes
from engine.parallel import RankShape
from segue.config import SchedulerConfig

LIBRARIES_BYTES = 900 * MIB
"""CUDA context, code of torch, cuBLAS, cuDNN and our kernels, nodes of the graphs: outside torch's allocator."""

WORKSPACE_BYTES = 3 * 32 * MIB
"""Of cuBLAS: 32 MiB for each stream that multiplies (steps, capture), and cuBLASLt's."""

SLACK = 0.7
"""Of passing memory, in blocks that torch's allocator keeps but cannot use again for another size. H200, Llama-8B shape
with 4 layers, steps of 8192 tokens: 7,009 MiB allocated at most, 8,070 kept; 1,280 MiB of them passing."""

GRAPHS_SLACK = 0.03
"""Of a family of graphs, which is captured largest first."""

META = torch.device("meta")


def lasting(
    spec: ArchSpec, scheduler: SchedulerConfig, vocab_size: int, blocks_max: int, dtype: torch.dtype
) -> list[LedgerLine]:
    rows, places = scheduler.max_num_seqs, _places(scheduler)
    scratch = _bytes_of(GeneralScratch.allocate(places, vocab_size, META))
    tables = rows * (spec.vocab_rows * (4 + 1) + ROW_WORDS * 4) + places * REPORT_WORDS * 4
    batch = _bytes_of(BatchBuffers.allocate(rows, blocks_max, spec.hidden, spec.head_dim, dtype, META))
    return [
        LedgerLine("sampling", scratch + tables, f"counts of {rows} rows, scores of {places} places"),
        LedgerLine("step inputs", batch + 4 * Places.WORDS * (rows + places), ""),
    ]


def passing(
    spec: ArchSpec,
    shape: RankShape,
    scheduler: SchedulerConfig,
    max_model_len: int,
    graphs: bool,
    dtype: torch.dtype,
    step_bytes: int,
) -> list[LedgerLine]:
    """`step_bytes`: activations and logits of the largest step."""
    attention = _prefill_attention(spec, shape, scheduler, max_model_len, dtype)
    lines = [
        LedgerLine("attention buffers", attention, "cuDNN"),
        LedgerLine("allocator slack", int((attention + step_bytes) * SLACK), "blocks kept for other sizes"),
        LedgerLine("libraries", LIBRARIES_BYTES + WORKSPACE_BYTES, "context, kernels, workspaces"),
    ]
    if graphs:
        largest = step_shapes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)[-1]
        taken = sum(_graph_pool(spec, shape, step, dtype) for step in (StepShape(0, scheduler.max_num_seqs), largest))
        lines.append(LedgerLine("graphs", int(taken * (1 + GRAPHS_SLACK)), f"up to {largest.tokens} chunk tokens"))
    return lines


def split_bytes(spec: ArchSpec, shape: RankShape, kv_dtype: torch.dtype) -> int:
    """Partial results of batch-invariant attention, which are there at one time."""
    queries = triton_attention.slice_queries(shape.heads // shape.kv_heads, spec.head_dim, kv_dtype)
    return triton_attention.ITEMS_MAX * shape.heads * queries * (spec.head_dim + 1) * 4


def _places(scheduler: SchedulerConfig) -> int:
    return max(shape.places for shape in step_shapes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs))


def _graph_pool(spec: ArchSpec, shape: RankShape, step: StepShape, dtype: torch.dtype) -> int:
    """One family of graphs shares the memory of its largest."""
    tokens = step.tokens + step.decodes
    activations = activation_bytes(spec, shape, tokens, dtype.itemsize)
    return activations + logits_bytes(spec, step.places, dtype.itemsize, copies_float32=1)


def _prefill_attention(
    spec: ArchSpec, shape: RankShape, scheduler: SchedulerConfig, max_model_len: int, dtype: torch.dtype
) -> int:
    """Keys and values of one piece, padded queries, and two results with their log-sum-exp."""
    chunk = scheduler.max_num_batched_tokens
    if chunk < cudnn_backend.CHUNK_MIN:
        return 0
    side = chunk + cudnn_backend.PIECE_MIN
    piece = max(side, min(cudnn_backend.PIECE_MAX, max_model_len))
    keys = 2 * piece * shape.kv_heads * spec.head_dim * dtype.itemsize
    queries = 3 * side * shape.heads * (spec.head_dim * dtype.itemsize + 4)
    return keys + queries


def _bytes_of(record: GeneralScratch | BatchBuffers) -> int:
    return sum(getattr(record, name).nbytes for name in record.__dataclass_fields__)
