"""Hash chains that name KV blocks, the same in every process, on every node and after every restart.

    root   = SHA-256 over everything that makes K/V exchangeable (weights, tokenizer, dtype, RoPE, block size, ...)
    root'  = SHA-256(root, salt of the tenant)        tenants never share, not even visibly by timing
    h_0    = SHA-256(root' + tokens of block 0)[:16]
    h_i    = SHA-256(h_{i-1} + tokens of block i)[:16]

Tokens enter as little-endian u32. Only full blocks have a hash; because a hash covers the whole prefix, equal hashes
mean equal K/V wherever the blocks lie. The parallel layout is not part of the chain.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence

HASH_BYTES = 16
"""128 bits: among 2^40 blocks a collision has a probability of about 2^-49."""

TOKEN_BYTES = 4


def chain_root(parts: Mapping[str, str | int | bytes]) -> bytes:
    """SHA-256 (32 bytes) over `parts`, sorted by name; each name and value is typed and length-prefixed, so that no two
    different mappings give the same input."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for field in (name.encode(), _typed(parts[name])):
            digest.update(struct.pack("<Q", len(field)))
            digest.update(field)
    return digest.digest()


def _typed(value: str | int | bytes) -> bytes:
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, bytes):
        return b"b" + value
    return b"i" + str(int(value)).encode()


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """HMAC-SHA-256 of the tenant's name under the server's secret; b"" for the empty tenant, which is not salted."""
    return hmac.digest(secret, tenant.encode(), "sha256") if tenant else b""


def tenant_root(kv_root: bytes, salt: bytes) -> bytes:
    """The chain root of one tenant (32 bytes); `kv_root` itself when `salt` is empty."""
    return chain_root({"kv_root": kv_root, "tenant_salt": salt}) if salt else kv_root


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises struct.error for an id outside [0, 2^32)."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def block_hash(parent: bytes, block_tokens: bytes) -> bytes:
    """Hash (16 bytes) of one full block after `parent`: the hash of the block before it, or the chain's root."""
    return hashlib.sha256(parent + block_tokens).digest()[:HASH_BYTES]


def block_hashes(
    root: bytes, token_ids: bytes, block_size: int, *, start_block: int = 0, parent: bytes | None = None
) -> list[bytes]:
    """Hashes (16 bytes each) of the full blocks of a sequence, from `start_block` on.

    `token_ids` holds the whole sequence from position 0 as little-endian u32, also when the chain is continued: then
    `parent` is the hash of block `start_block - 1`. Raises ValueError when the two do not fit together.
    """
    if (start_block == 0) != (parent is None):
        raise ValueError("a chain is continued with both start_block and parent, or started with neither")
    stride = block_size * TOKEN_BYTES
    previous = root if parent is None else parent
    hashes = []
    for start in range(start_block * stride, len(token_ids) - stride + 1, stride):
        previous = block_hash(previous, token_ids[start : start + stride])
        hashes.append(previous)
    return hashes
