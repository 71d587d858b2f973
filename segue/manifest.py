"""What an instance says about itself when it registers, and when two instances may be paired."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.wire_version import WIRE_VERSION, wire_refusal


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class InstanceManifest(msgspec.Struct, frozen=True, kw_only=True):
    ref: InstanceRef
    name: str
    role: Role
    host: str
    """Identity of the machine (boot id), a hint only: whether memory can be shared is probed."""
    pid: int
    model: str
    card_digest: str
    kv_root: str
    """Hex digest over everything that makes KV blocks exchangeable (weights, tokenizer, dtype, RoPE, block size)."""
    layout: KvLayout
    pages_total: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    control_address: str
    """Where the hand-off control channel of this instance listens."""
    events_address: str
    """Where this instance publishes KV events and load reports."""
    numerics: str = ""
    """Of a batch-invariant instance: what the bits of its results depend on (processor, libraries, threads)."""
    fetches: bool = False
    """It can copy cached blocks from another instance before it computes, and hands out its own."""
    wire_version: int = WIRE_VERSION
    version: str = ""


def pairing_refusal(prefill: InstanceManifest, decode: InstanceManifest) -> str | None:
    """Why P may not hand KV to D, or None when it may."""
    refusal = wire_refusal(prefill, decode)
    if refusal is not None:
        return refusal
    checks = (
        ("model", prefill.model, decode.model),
        ("KV dtype", prefill.layout.dtype, decode.layout.dtype),
        ("block size", prefill.layout.block_size, decode.layout.block_size),
        ("KV layout", prefill.layout, decode.layout),
        ("batch-invariant arithmetic", prefill.numerics or "none", decode.numerics or "none"),
        ("weights, tokenizer or attention configuration", prefill.kv_root, decode.kv_root),
    )
    for what, mine, theirs in checks:
        if mine != theirs:
            return f"{what} differs: {prefill.name} has {mine}, {decode.name} has {theirs}"
    return None
