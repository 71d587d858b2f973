"""Geometry of KV pages: `[page][layer][K|V][kv_head][token][dim]`, one contiguous run of bytes per page."""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one page. A token's K/V over all layers is `token_bytes`."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.block_size
