"""What a routing policy is asked and answers, and what any policy has to respect: room, hand-off, queue bounds.

A policy only ranks; the core reserves. `joint_policy` has the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from conductor.core.beliefs import Beliefs
from conductor.core.events import RequestArrived
from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance

PREFILL_BATCHES_QUEUED_MAX = 4
PREFILL_ATTEMPTS_MIN = 2
"""A prefill instance is given work up to PREFILL_BATCHES_QUEUED_MAX token budgets, and always one attempt beyond the
running one so that it never idles. What is more waits here, where it can still be placed anywhere."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to place and where its prefix is: usable tokens by instance uuid, absent for none."""

    request: RequestArrived
    tokens_growth: int
    """Still to be generated: what room is made for, a high quantile."""
    held: Mapping[str, int]
    """What instances hold now (believed KV events)."""
    held_soon: Mapping[str, int]
    """What they hold now, or will when their live attempts are computed."""
    blocks_in_use: Mapping[str, int] = {}
    """Leading blocks of the prompt for which live attempts have pages there: sharing them takes no room."""
    now_us: int
    tie_hash: int
    """Of the prefix root: equals are ordered by rendezvous of this and the instance."""
    tokens_answer: int = 256
    """Still to be generated: what is expected."""
    answers: tuple[int, ...] = (256,)
    """Equally likely values of it."""
    waited_us: int = 0
    """Since it arrived here."""
    requests_waiting: int = 0
    """In this Conductor's queue, this one among them."""
    blocks_cached: int = 0
    """In the whole cluster."""
    beliefs: Beliefs = msgspec.field(default_factory=Beliefs)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    prefill: Instance | None
    decode: Instance
    tokens_compute: int
    """Prompt tokens that the computing instance (P, or D itself) is left with."""
    tokens_cached: int
    cost: float
    held_prefill: int = 0
    """Usable prefix tokens that P holds, and D: their pages need not be found."""
    held_decode: int = 0
    compute_us: float = 0.0
    """Predicted time of computing `tokens_compute`, where the policy predicts."""
    source: Instance | None = None
    """Where the computing instance gets `tokens_fetched` from, beyond what it holds itself."""
    tokens_fetched: int = 0
    ttft_us: float = 0.0
    tpot_us: float = 0.0
    """Predicted, 0 where the policy does not predict."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A policy will not take the request, now or by waiting. `resource` is what is short."""

    reason: str
    resource: str
    retry_after_ms: int


class RoutingPolicy(Protocol):
    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice] | Refusal:
        """Choices that have room now, best first; empty when nothing has: then the request waits."""


def usable_tokens(blocks: Mapping[str, int], block_size: int, tokens_known: int) -> dict[str, int]:
    """Usable prefix: at least the last token is always computed, because its logits are needed."""
    return {uuid: min(held * block_size, tokens_known - 1) for uuid, held in blocks.items()}


def tokens_missing(query: Query, instance: Instance) -> int:
    """What a prefill at `instance` would compute."""
    return query.request.tokens_known - query.held_soon.get(instance.uuid, 0)


def tokens_lacking(query: Query, instance: Instance) -> int:
    """What a decode at `instance` has to be sent."""
    return query.request.tokens_known - query.held.get(instance.uuid, 0)


def pages_added(query: Query, instance: Instance, tokens: int) -> int:
    """Pages that come into use with a sequence of `tokens`, whose prompt this is. A block that is only cached does."""
    return instance.pages_for(tokens) - query.blocks_in_use.get(instance.uuid, 0)


def can_prefill(query: Query, instance: Instance) -> bool:
    """Room for the prompt, and a queue short enough."""
    known = query.request.tokens_known
    if query.now_us < instance.refused_until_us or known > instance.tokens_capacity:
        return False
    if not instance.has_room(pages_added(query, instance, known)):
        return False
    queue_max = PREFILL_BATCHES_QUEUED_MAX * instance.manifest.max_num_batched_tokens
    return (
        instance.booked_rows < PREFILL_ATTEMPTS_MIN
        or instance.tokens_queued + tokens_missing(query, instance) <= queue_max
    )


def can_decode(query: Query, instance: Instance) -> bool:
    """Room for the prompt and the predicted growth."""
    return can_compute_locally(query, instance) and pages_short(query, instance) <= 0


def can_compute_locally(query: Query, instance: Instance) -> bool:
    """A place in the batch; the room may come later, because nobody else waits for it in the meantime."""
    if query.now_us < instance.refused_until_us or query.request.tokens_max > instance.tokens_capacity:
        return False
    return instance.rows_used < instance.manifest.max_num_seqs


def pages_short(query: Query, instance: Instance) -> int:
    """Pages that have to come free before a decode instance has room; below 1 it has."""
    tokens = query.request.tokens_known + query.tokens_growth
    return instance.pages_used + pages_added(query, instance, tokens) - instance.manifest.pages_total


def computes_at_decode(query: Query, decode: Instance) -> bool:
    """D lacks at most one block: it computes the rest itself."""
    return tokens_lacking(query, decode) <= min(decode.block_size, query.request.tokens_known - 1)
