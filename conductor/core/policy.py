"""Which instances an attempt should run on: filters -> scorers -> picker. A policy only ranks; the core reserves.

One unit of cost: tokens of prefill compute. For a pair (P, D)

    cost = queued(P) + missing(P) * COMPUTE + moved(D) * MOVE + load(D) + ramp + penalty(P) + penalty(D) + penalty(P, D)

where missing(P) are the tokens that P does not hold, and is 0 when D lacks at most one block (D then computes the rest
itself and P is let go). moved(D) are the tokens that D does not hold. For a local prefill the queue and the missing
tokens are D's own. Scorers read the same records that a learned predictor would, so that a joint predicted-latency
cost can replace this one behind `RoutingPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from conductor.core.events import RequestArrived
from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.rendezvous import weight

MOVE_COST = 0.05
"""Moving a token's K/V against computing it: a 1B model's token is ~100 KB, some 10 us on a 10 GB/s link."""

COMPUTE_COST = 1.5
"""A token computed again costs its time and the room of somebody else's: waiting for a prefix that is being computed
beats computing it twice, until the queue is half as long again as the prefix."""

LOCAL_PREFILL_COST = 2.0
"""As COMPUTE_COST; a token prefilled between decode steps also delays the sequences that run there."""

DECODE_LOAD_STEPS = 4
"""A full decode instance costs as much as this many full prefill steps."""

PREFILL_BATCHES_QUEUED_MAX = 4
PREFILL_ATTEMPTS_MIN = 2
"""A prefill instance is given work up to PREFILL_BATCHES_QUEUED_MAX token budgets, and always one attempt beyond the
running one so that it never idles. What is more waits here, where it can still be placed anywhere."""

SIDE_CANDIDATES_MAX = 4
"""Best prefill and decode instances that are paired up: 16 pairs instead of 128 x 128."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to place and where its prefix is: usable tokens by instance uuid, absent for none."""

    request: RequestArrived
    tokens_growth: int
    held: Mapping[str, int]
    """What instances hold now (believed KV events)."""
    held_soon: Mapping[str, int]
    """What they hold now, or will when their live attempts are computed."""
    now_us: int
    tie_hash: int
    """Of the prefix root: equals are ordered by rendezvous of this and the instance."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    prefill: Instance | None
    decode: Instance
    tokens_compute: int
    """Prompt tokens that the computing instance (P, or D itself) is left with."""
    tokens_cached: int
    cost: float
    held_prefill: int = 0
    """Usable prefix tokens that P holds, and D: their pages are shared, not booked again."""
    held_decode: int = 0


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


def can_prefill(query: Query, instance: Instance) -> bool:
    """Room for the prompt, and a queue short enough."""
    known = query.request.tokens_known
    if query.now_us < instance.refused_until_us or known > instance.tokens_capacity:
        return False
    if not instance.has_room(instance.pages_missing(known, query.held_soon.get(instance.uuid, 0))):
        return False
    queue_max = PREFILL_BATCHES_QUEUED_MAX * instance.manifest.max_num_batched_tokens
    return (
        instance.booked_rows < PREFILL_ATTEMPTS_MIN
        or instance.tokens_queued + tokens_missing(query, instance) <= queue_max
    )


def can_decode(query: Query, instance: Instance) -> bool:
    """Room for what is missing of the prompt, and for the predicted growth."""
    return _has_room_to_decode(query, instance, query.held)


def can_compute_locally(query: Query, instance: Instance) -> bool:
    """As `can_decode`, in an instance where a prefix that is being computed will be shared."""
    return _has_room_to_decode(query, instance, query.held_soon)


def _has_room_to_decode(query: Query, instance: Instance, held: Mapping[str, int]) -> bool:
    request = query.request
    if query.now_us < instance.refused_until_us or request.tokens_max > instance.tokens_capacity:
        return False
    tokens = request.tokens_known + query.tokens_growth
    return instance.has_room(instance.pages_missing(tokens, held.get(instance.uuid, 0)))


def prefill_cost(query: Query, instance: Instance) -> float:
    return instance.tokens_queued + tokens_missing(query, instance) * COMPUTE_COST


def decode_cost(query: Query, instance: Instance) -> float:
    manifest = instance.manifest
    fullness = max(instance.rows_used / manifest.max_num_seqs, instance.pages_used / manifest.pages_total)
    load = fullness * DECODE_LOAD_STEPS * manifest.max_num_batched_tokens
    return tokens_lacking(query, instance) * MOVE_COST + load


def local_cost(query: Query, instance: Instance) -> float:
    manifest = instance.manifest
    fullness = max(instance.rows_used / manifest.max_num_seqs, instance.pages_used / manifest.pages_total)
    compute = instance.tokens_queued + tokens_missing(query, instance) * LOCAL_PREFILL_COST
    return compute + fullness * DECODE_LOAD_STEPS * manifest.max_num_batched_tokens


Scorer = Callable[[Query, Instance], float]
Filter = Callable[[Query, Instance], bool]


class PrefixAndLoadPolicy:
    """The default policy."""

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice]:
        prefills = _cheapest(query, candidates.prefills, can_prefill, prefill_cost, health)
        credit = min((cost for _, cost in prefills), default=0.0)
        decodes = _cheapest(query, candidates.decodes, can_decode, _decode_cost_with_credit(credit), health)
        locals_ = _cheapest(query, candidates.locals, can_compute_locally, local_cost, health)
        choices = [_pair(query, prefill, decode, credit, health) for prefill in prefills for decode in decodes]
        choices += [_local(query, instance, cost) for instance, cost in locals_]
        return sorted(choices, key=lambda choice: (choice.cost, -_choice_weight(query.tie_hash, choice)))


def computes_at_decode(query: Query, decode: Instance) -> bool:
    """D lacks at most one block: it computes the rest itself."""
    return tokens_lacking(query, decode) <= min(decode.block_size, query.request.tokens_known - 1)


def _decode_cost_with_credit(credit: float) -> Scorer:
    """Ranks decode instances for pairing: one that holds the prompt saves the cheapest prefill, which is `credit`."""
    return lambda query, decode: decode_cost(query, decode) - (credit if computes_at_decode(query, decode) else 0.0)


def _cheapest(
    query: Query, instances: Sequence[Instance], fits: Filter, score: Scorer, health: HealthBook
) -> list[tuple[Instance, float]]:
    """The SIDE_CANDIDATES_MAX cheapest that fit, with their cost; equals in rendezvous order of the prefix. Being fresh
    costs only beside warm ones: when a whole cluster starts, nobody is to be spared."""
    now_us = query.now_us
    ramps = any(instance.is_warm(now_us) for instance in instances)
    penalty = health.penalty_tokens
    scored = [
        (
            score(query, instance) + penalty(now_us, instance.uuid) + (instance.ramp_tokens(now_us) if ramps else 0.0),
            instance,
        )
        for instance in instances
        if fits(query, instance)
    ]
    scored.sort(key=lambda entry: entry[0])
    if len(scored) > SIDE_CANDIDATES_MAX:
        cost_max = scored[SIDE_CANDIDATES_MAX - 1][0]
        scored = [entry for entry in scored if entry[0] <= cost_max]
        scored.sort(key=lambda entry: (entry[0], -weight(query.tie_hash, entry[1].stable_hash)))
    return [(instance, cost) for cost, instance in scored[:SIDE_CANDIDATES_MAX]]


def _pair(
    query: Query,
    prefill: tuple[Instance, float],
    decode: tuple[Instance, float],
    credit: float,
    health: HealthBook,
) -> Choice:
    (source, source_cost), (target, target_cost) = prefill, decode
    link_cost = health.penalty_tokens(query.now_us, source.uuid, target.uuid)
    if computes_at_decode(query, target):
        hit = query.held.get(target.uuid, 0)
        cost = target_cost + credit + link_cost + health.penalty_tokens(query.now_us, source.uuid)
        return Choice(
            prefill=source,
            decode=target,
            tokens_compute=0,
            tokens_cached=hit,
            cost=cost,
            held_prefill=query.held_soon.get(source.uuid, 0),
            held_decode=hit,
        )
    return Choice(
        prefill=source,
        decode=target,
        tokens_compute=tokens_missing(query, source),
        tokens_cached=query.held_soon.get(source.uuid, 0),
        cost=source_cost + target_cost + link_cost,
        held_prefill=query.held_soon.get(source.uuid, 0),
        held_decode=query.held.get(target.uuid, 0),
    )


def _local(query: Query, instance: Instance, cost: float) -> Choice:
    return Choice(
        prefill=None,
        decode=instance,
        tokens_compute=tokens_missing(query, instance),
        tokens_cached=query.held_soon.get(instance.uuid, 0),
        cost=cost,
        held_decode=query.held_soon.get(instance.uuid, 0),
    )


def _choice_weight(tie_hash: int, choice: Choice) -> int:
    own = weight(tie_hash, choice.decode.stable_hash)
    return own if choice.prefill is None else own + weight(tie_hash, choice.prefill.stable_hash)
