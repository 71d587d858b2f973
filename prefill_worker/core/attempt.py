"""What a prefill instance knows about one attempt."""

from __future__ import annotations

import struct

from segue.batch_planner import SeqUpdate
from segue.handoff import PrefillState, prefill_handoff
from segue.ids import AttemptRef, InstanceRef
from segue.plan import TokenLogprobs
from segue.worker_messages import Assign, Peer, TokenDelta


class PrefillAttempt:
    """Mutable record, changed by the core alone.

    Blocks are counted from the start of the sequence. `blocks_handed` blocks have been given to the mover or are at D
    already; from `blocks_failed` on they cannot be trusted.
    """

    __slots__ = (
        "arrived_us",
        "asked_first_us",
        "assign",
        "blocks_failed",
        "blocks_handed",
        "conductor",
        "deadline_us",
        "ended_reason",
        "finish",
        "first_block",
        "first_token",
        "handoff",
        "hashes",
        "holder_us",
        "logprobs",
        "moves",
        "order",
        "pages_target",
        "passed_over",
        "said_us",
        "seq",
        "started_us",
        "target",
        "tokens",
        "tokens_computed",
        "tokens_generated",
    )

    def __init__(self, assign: Assign, target: Peer, conductor: str, seq: int, now_us: int) -> None:
        self.assign = assign
        self.target = target
        self.conductor = conductor
        self.seq = seq
        self.order = seq
        self.tokens = list(struct.unpack(f"<{len(assign.token_ids) // 4}I", assign.token_ids))
        self.handoff = prefill_handoff()
        self.hashes: list[bytes] | None = None
        """Chain over the full blocks, once it was asked for."""
        self.passed_over = 0
        """Later attempts that were started before this one."""
        self.arrived_us = now_us
        self.holder_us = 0
        """How long D may be silent: the holder's share of the lease it granted, of the own lease before."""
        self.deadline_us = now_us + assign.deadline_ms * 1000 if assign.deadline_ms else None
        self.asked_first_us: int | None = None
        self.said_us = now_us
        """When D was last asked or told what it must answer."""
        self.started_us: int | None = None
        self.first_block = 0
        self.pages_target: list[int] = []
        self.tokens_computed = 0
        self.blocks_handed = 0
        self.blocks_failed: int | None = None
        self.moves: dict[int, tuple[int, list[int]]] = {}
        """Outstanding op -> (first block, source pages), in block order."""
        self.first_token: int | None = None
        self.logprobs: TokenLogprobs | None = None
        self.tokens_generated = 0
        self.finish = ""
        self.ended_reason = ""

    @property
    def key(self) -> AttemptRef:
        return self.assign.key

    @property
    def peer(self) -> InstanceRef:
        return self.target.ref

    @property
    def state(self) -> PrefillState:
        return self.handoff.state

    @property
    def tokens_left(self) -> int:
        return len(self.tokens) - self.tokens_computed

    def blocks_total(self, block_size: int) -> int:
        return -(-len(self.tokens) // block_size)

    def blocks_ready(self, block_size: int) -> int:
        """Blocks whose K/V is final: full ones, and the partial tail once the whole prompt is computed."""
        if self.tokens_left == 0 and self.first_token is not None:
            return self.blocks_total(block_size)
        return self.tokens_computed // block_size


def first_delta(attempt: PrefillAttempt, update: SeqUpdate, now_us: int) -> TokenDelta:
    """The first token (or the failure instead of it, or scores of prompt tokens before it), with how long it waited and
    how long it was computed."""
    started_us = now_us if attempt.started_us is None else attempt.started_us
    return TokenDelta(
        request_id=attempt.key.request_id,
        attempt=attempt.key.attempt,
        position=len(attempt.tokens),
        token_ids=update.tokens,
        logprobs=update.logprobs,
        finish=update.finish,
        error=update.error,
        tokens_cached=update.tokens_cached,
        from_prefill=True,
        queue_us=started_us - attempt.arrived_us,
        compute_us=now_us - started_us,
        scores=update.scores,
    )
