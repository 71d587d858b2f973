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

from msgspec.structs import replace

from segue.errors import InternalError, InvalidField
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
        "tokens_end",
        "tokens_limit",
        "tokens_prompt",
        "tokens_stop",
    )

    def __init__(
        self, seq: int, tokens: list[int], tokens_prompt: int, sampling: SamplingParams, hash_root: bytes, order: int
    ) -> None:
        self.seq = seq
        self.tokens = tokens
        self.tokens_prompt = tokens_prompt
        self.sampling = sampling
        self.hash_root = hash_root
        self.order = order
        self.prefill_only = False
        self.tokens_end = tokens_prompt + sampling.max_tokens
        """At this many tokens the sequence has its full length."""
        self.tokens_limit = self.tokens_end
        """At this many tokens, known or being sampled, no more are planned."""
        self.tokens_stop = tokens_prompt + sampling.min_tokens
        """With fewer tokens a stop token does not end it."""
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.hashes: list[bytes] = []
        """Chain over the full blocks of `tokens`; may lag behind."""
        self.state = SeqState.WAITING
        self.row: int | None = None
        self.pages: list[int] = []
        self.pending = 0
        self.scheduled = 0
        self.computed = 0
        self.blocks_published = 0
        """Leading blocks that are published, or stay private for good."""
        self.tokens_cached: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.op = 0
        """The last plan that names the sequence."""

    @property
    def age(self) -> tuple[int, int]:
        return (self.order, self.seq)

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens have still to be scored: that takes their logits, which no cached prefix holds."""
        return self.sampling.prompt_logprobs is not None

    def scored(self, positions: int) -> None:
        """Logits of the first `positions` positions were seen; behind the prompt's last token they are a sample's."""
        if self.wants_scores and positions >= self.tokens_prompt - 1:
            self.sampling = replace(self.sampling, prompt_logprobs=None)

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

    def extend(self, tokens: list[int]) -> tuple[int, str]:
        """Add sampled tokens up to the one that ends the sequence: how many, and "stop", "length" or ""."""
        if len(self.tokens) + len(tokens) < self.tokens_end and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return len(tokens), ""
        for count, token in enumerate(tokens, 1):
            finish = self.append(token)
            if finish:
                return count, finish
        return len(tokens), ""

    def append(self, token: int) -> str:
        """Add a sampled token. Returns "stop" or "length" when it ends the sequence, else ""."""
        self.tokens.append(token)
        count = len(self.tokens)
        if token in self.stop_ids and count >= self.tokens_stop:
            return "stop"
        return "length" if count >= self.tokens_end else ""


def new_sequence(
    seq: int,
    tokens: list[int],
    tokens_prompt: int,
    sampling: SamplingParams,
    hash_root: bytes,
    order: int,
    tokens_max: int,
) -> Sequence:
    """A waiting sequence of at most `tokens_max` tokens in all.

    Raises InvalidField when there is nothing to compute, or no room for even one more token.
    """
    if not 0 < tokens_prompt <= len(tokens):
        raise InvalidField("prompt", f"{tokens_prompt} prompt tokens of {len(tokens)}")
    if len(tokens) >= tokens_max:
        raise InvalidField("prompt", f"{len(tokens)} tokens, this instance takes at most {tokens_max - 1}")
    record = Sequence(seq, list(tokens), tokens_prompt, sampling, hash_root, order)
    if len(tokens) >= record.tokens_end:
        raise InvalidField("max_tokens", f"{sampling.max_tokens} leaves nothing to generate")
    record.tokens_end = record.tokens_limit = min(record.tokens_end, tokens_max)
    record.scored(0)
    return record
