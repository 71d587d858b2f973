"""One sequence inside a batch planner: what is known, what is computed, what is in flight.

    WAITING     owns no page; its tokens wait to be computed (for the first time, or again after a preemption)
    RUNNING     owns a block table; computes whenever it has a row of the batch
    PREEMPTING  lost its place, but a plan in flight still writes its pages; waits again when that has landed
    PARKED      computes no more, keeps its pages until they are released (prefill handed off elsewhere)
    ENDED       forgotten; results that still arrive for it are dropped

Counting, with n = len(tokens): `pending` tokens are being sampled by plans in flight, K/V of `scheduled` positions will
exist once these have landed, K/V of `computed` positions exists now. A sequence decodes when exactly one position is
left (n + pending - scheduled == 1), and prefills when there are more.
"""

from __future__ import annotations

from enum import Enum

from segue.errors import InternalError
from segue.sampling_params import SamplingParams


class SeqState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    PARKED = "parked"
    ENDED = "ended"


TRANSITIONS: dict[SeqState, frozenset[SeqState]] = {
    SeqState.WAITING: frozenset({SeqState.RUNNING, SeqState.ENDED}),
    SeqState.RUNNING: frozenset({SeqState.WAITING, SeqState.PREEMPTING, SeqState.PARKED, SeqState.ENDED}),
    SeqState.PREEMPTING: frozenset({SeqState.WAITING, SeqState.ENDED}),
    SeqState.PARKED: frozenset({SeqState.ENDED}),
    SeqState.ENDED: frozenset(),
}


class Sequence:
    """Mutable record, changed by the planner alone."""

    __slots__ = (
        "blocks_published",
        "computed",
        "hash_root",
        "hashes",
        "op",
        "order",
        "pages",
        "pending",
        "prefill_only",
        "row",
        "sampling",
        "scheduled",
        "seq",
        "state",
        "stop_ids",
        "tokens",
        "tokens_cached",
        "tokens_limit",
        "tokens_prompt",
    )

    def __init__(
        self,
        seq: int,
        tokens: list[int],
        tokens_prompt: int,
        sampling: SamplingParams,
        hash_root: bytes,
        *,
        order: int,
        tokens_limit: int,
        stop_ids: frozenset[int],
        hashes: list[bytes],
    ) -> None:
        self.seq = seq
        self.tokens = tokens
        self.tokens_prompt = tokens_prompt
        self.sampling = sampling
        self.hash_root = hash_root
        self.order = order
        self.prefill_only = False
        self.tokens_limit = tokens_limit
        """Once this many tokens are known or being sampled, no more are planned."""
        self.stop_ids = stop_ids
        self.hashes = hashes
        """Chain over the full blocks of `tokens`; may lag behind."""
        self.state = SeqState.WAITING
        self.row: int | None = None
        self.pages: list[int] = []
        self.pending = 0
        self.scheduled = 0
        self.computed = 0
        self.blocks_published = 0
        self.tokens_cached: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.op = 0
        """The last plan that names the sequence."""

    @property
    def age(self) -> tuple[int, int]:
        return (self.order, self.seq)

    @property
    def tokens_expected(self) -> int:
        """Tokens once all plans in flight have landed; fewer if the engine does fewer steps than allowed."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions still to be computed."""
        return len(self.tokens) + self.pending - self.scheduled

    def move(self, state: SeqState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"sequence {self.seq} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def finish_reason(self, tokens_max: int) -> str:
        """ "stop" or "length" when the newest token ends the sequence, else "". No stop before `min_tokens`."""
        generated = len(self.tokens) - self.tokens_prompt
        sampling = self.sampling
        if self.tokens[-1] in self.stop_ids and generated >= sampling.min_tokens:
            return "stop"
        if generated >= sampling.max_tokens or len(self.tokens) >= tokens_max:
            return "length"
        return ""
