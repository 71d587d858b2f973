"""Block hashes of a growing token log, extended instead of recomputed when a request is planned again."""

from __future__ import annotations

from conductor.ports import ServedModel
from segue.block_hash import block_hashes, tenant_root, tenant_salt


class HashChain:
    """Chain over the full blocks of one request's tokens under its tenant's root."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self._hashes: list[bytes] = []

    def over(self, token_ids: bytes) -> list[bytes]:
        """Hashes of all full blocks of `token_ids` (little-endian u32), which extends what was hashed before."""
        known = self._hashes
        known += block_hashes(
            self.root, token_ids, self.block_size, start_block=len(known), parent=known[-1] if known else None
        )
        return list(known)


def tenant_chain(served: ServedModel, secret: bytes, tenant: str) -> HashChain:
    """The salt is derived from a secret of the server: a client cannot choose another tenant's chain."""
    return HashChain(tenant_root(served.kv_root, tenant_salt(secret, tenant)), served.block_size)
