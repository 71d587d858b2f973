"""The contract between the model and its attention backends.

K/V of a step's new tokens are stored into pages before attention of that layer runs, so a backend only reads pages:
query token i of row r stands at position `seq_lens[r] - query_len(r) + i` and sees keys 0 .. its own position, or with
`window` W only the last W of them (its own included). A page holds `[layer][K|V][kv_head][token][dim]`; strides come
from the tensor and offsets need 64 bits. Query head h reads kv-head `h // (heads // kv_heads)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's geometry, the same for all layers. Tensors live on the device of the pages.

    block_tables   int32 [rows, blocks_max]; entries past a row's last block are not read
    seq_lens       int32 [rows]; K/V length, this step's tokens included
    query_starts   int32 [rows + 1]; row r's queries are tokens query_starts[r] .. query_starts[r+1]-1
    max_query, max_seq   upper bounds over rows (exact unless a captured graph pads them)
    max_tokens     upper bound of all rows' queries together, where it is much below rows * max_query
    decode_only    every row has exactly one query
    seq_lens_host, query_starts_host   the same numbers on the host where the caller has them (spares a sync)
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_query: int
    max_seq: int
    decode_only: bool
    seq_lens_host: tuple[int, ...] | None = None
    query_starts_host: tuple[int, ...] | None = None
    max_tokens: int | None = None

    def seq_lens_on_host(self) -> tuple[int, ...]:
        """Reads them back, and waits for the device, where the caller did not have them."""
        return self.seq_lens_host or tuple(self.seq_lens.tolist())

    def query_starts_on_host(self) -> tuple[int, ...]:
        return self.query_starts_host or tuple(self.query_starts.tolist())


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend is built for: one model's attention on one device. `heads` and `kv_heads` are this rank's."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    windowed: bool = False
    """Some layer has a sliding window."""
    soft_capped: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What a backend can run; `registry.resolve` compares it with an AttentionShape."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    prefill: bool = True
    decode: bool = True
    window: bool = True
    soft_cap: bool = True
    head_dims: tuple[int, ...] = ()
    """Empty: any."""
    block_sizes: tuple[int, ...] = ()
    """Empty: any."""
    graph_capture: bool = False
    """`plan` and `forward` may run inside CUDA graph capture (no sync, no host-dependent launch shape)."""


class AttentionBackend(Protocol):
    """Built as `Backend(shape: AttentionShape)`. `name` and `capabilities` are class attributes."""

    name: str
    capabilities: AttentionCapabilities

    def plan(self, batch: AttentionBatch) -> Any:
        """Work shared by all layers of one step; the result is passed to every `forward` of the step."""

    def forward(
        self,
        plan: Any,
        layer: int,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], kv_pages [pages, layers, 2, kv_heads, block, dim] -> [tokens, heads, dim] like q.

        `out`, where given, receives the result and is returned.
        Scores are q.k * scale, then soft_cap * tanh(score / soft_cap) where set, softmax in float32.
        """
