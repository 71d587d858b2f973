"""What a decode instance knows about one attempt."""

from __future__ import annotations

import struct

from segue.batch_planner import Reservation
from segue.block_hash import block_hashes
from segue.handoff import DecodeState, decode_handoff
from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import Assign


class DecodeAttempt:
    """Mutable record, changed by the core alone."""

    __slots__ = (
        "arrived_us",
        "asked_us",
        "assign",
        "conductor",
        "deadline_us",
        "ended_reason",
        "handoff",
        "hashes",
        "lease_until_us",
        "position",
        "reservation",
        "said_us",
        "seq",
        "tokens",
        "tokens_generated",
        "was_handed_over",
    )

    def __init__(self, assign: Assign, conductor: str, seq: int, block_size: int, now_us: int, lease_us: int) -> None:
        self.assign = assign
        self.conductor = conductor
        self.seq = seq
        self.tokens = list(struct.unpack(f"<{len(assign.token_ids) // 4}I", assign.token_ids))
        self.hashes = block_hashes(assign.hash_root, assign.token_ids, block_size)
        self.handoff = decode_handoff()
        self.arrived_us = now_us
        self.deadline_us = now_us + assign.deadline_ms * 1000 if assign.deadline_ms else None
        self.lease_until_us = now_us + lease_us
        """When P is taken for gone unless it mentions the attempt before."""
        self.asked_us: int | None = None
        """When P first asked for pages."""
        self.said_us = now_us
        self.reservation: Reservation | None = None
        self.position = len(self.tokens)
        """Where the next token to be emitted stands."""
        self.tokens_generated = 0
        self.was_handed_over = False
        """Whether P computed the prompt (else D did)."""
        self.ended_reason = ""

    @property
    def key(self) -> AttemptRef:
        return self.assign.key

    @property
    def peer(self) -> InstanceRef | None:
        return None if self.assign.prefill is None else self.assign.prefill.ref

    @property
    def state(self) -> DecodeState:
        return self.handoff.state
