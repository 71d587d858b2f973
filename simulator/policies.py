"""Routing policies of other systems, each by its published rule, behind the Conductor core's `RoutingPolicy`.

Each sees what ours sees. They queue at the instances, as their systems do: a prefill or aggregated instance is never
too busy for them. A decode instance must have room, because ours refuses what it cannot hold.

| name | rule |
| --- | --- |
| random, round-robin, least-loaded | what they say; load is queued tokens at P, requests at D |
| mooncake | Algorithm 1 of the FAST'25 paper: least predicted TTFT, recompute or fetch; may reject by SLO |
| mooncake-local | the same without fetching: each instance by its own cache ("local cache-aware" there) |
| dynamo | argmin of prefill blocks left after hits, plus active blocks; short remainders are prefilled at D |
| sglang | cache-aware router: shortest queue when out of balance, else the best match above 0.3, else least loaded |
| llm-d | sticky until saturated: instances with 0.8 of the prompt, until a cold one would answer much sooner |
| llm-d-precise | the highest sum of scores for matched prefix, free KV memory and a short queue |
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.joint_policy import JointPolicy
from conductor.core.policy import (
    Choice,
    Query,
    Refusal,
    RoutingPolicy,
    can_decode,
    computes_at_decode,
    tokens_missing,
)
from conductor.core.rendezvous import weight
from segue.cost_model import CostModel, LinkCost
from segue.ids import AttemptRef
from simulator.llm_d import StickyUntilSaturated, highest_score


class Fetch(msgspec.Struct, frozen=True):
    """A prefix to be copied to the chosen prefill instance before it starts."""

    source: str
    target: str
    blocks: int


class PolicyNotes:
    """What a policy decides beyond a choice, by attempt; its host takes it out after each step."""

    def __init__(self) -> None:
        self.fetches: dict[AttemptRef, Fetch] = {}
        self.at_landing: Callable[[AttemptRef], str] | None = None
        """Asked when a hand-off is complete; a reason rejects the request then."""


class PolicyContext(msgspec.Struct, frozen=True, kw_only=True):
    """What policies may know of the hardware and the objectives. `seed` is the Conductor's own."""

    cost: CostModel
    link: LinkCost
    seed: int = 0
    slo_ttft_us: float = float("inf")
    slo_tpot_us: float = float("inf")
    uniform_decode_us: float = 10_000_000.0
    """t_d of Mooncake's prediction: what every decode is taken to last."""
    notes: PolicyNotes = msgspec.field(default_factory=PolicyNotes)


Pick = Callable[[Query, Sequence[Instance]], Instance]


class TwoPicks:
    """A prefill and a decode instance, picked one after the other; where there are no prefill instances, the first pick
    is that of the one instance which does both."""

    def __init__(self, prefill: Pick, decode: Pick) -> None:
        self._prefill = prefill
        self._decode = decode

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice]:
        if not candidates.prefills:
            locals_ = fitting(query, candidates.locals)
            return [local_choice(query, self._prefill(query, locals_))] if locals_ else []
        prefills = fitting(query, candidates.prefills)
        decodes = [instance for instance in candidates.decodes if can_decode(query, instance)]
        if not prefills or not decodes:
            return []
        return [pair_choice(query, self._prefill(query, prefills), self._decode(query, decodes))]


def fitting(query: Query, instances: Sequence[Instance]) -> list[Instance]:
    return [instance for instance in instances if query.request.tokens_known <= instance.tokens_capacity]


def pair_choice(query: Query, prefill: Instance, decode: Instance) -> Choice:
    """What the pair has to compute, by the rules of the hand-off."""
    if computes_at_decode(query, decode):
        cached = query.held.get(decode.uuid, 0)
        return _choice(query, prefill, decode, 0, cached)
    return _choice(query, prefill, decode, tokens_missing(query, prefill), query.held_soon.get(prefill.uuid, 0))


def _choice(query: Query, prefill: Instance, decode: Instance, missing: int, cached: int, cost: float = 0.0) -> Choice:
    return Choice(
        prefill=prefill,
        decode=decode,
        tokens_compute=missing,
        tokens_cached=cached,
        cost=cost,
        held_prefill=query.held_soon.get(prefill.uuid, 0),
        held_decode=query.held.get(decode.uuid, 0),
    )


def local_choice(query: Query, instance: Instance) -> Choice:
    cached = query.held_soon.get(instance.uuid, 0)
    missing = tokens_missing(query, instance)
    return Choice(
        prefill=None, decode=instance, tokens_compute=missing, tokens_cached=cached, cost=0.0, held_decode=cached
    )


def least(query: Query, instances: Sequence[Instance], score: Callable[[Instance], float]) -> Instance:
    """The least score; equals in rendezvous order of the prefix."""
    return min(instances, key=lambda instance: (score(instance), -weight(query.tie_hash, instance.stable_hash)))


def shortest_prefill_queue(query: Query, instances: Sequence[Instance]) -> Instance:
    return least(query, instances, lambda instance: instance.tokens_queued)


def fewest_requests(query: Query, instances: Sequence[Instance]) -> Instance:
    return least(query, instances, lambda instance: instance.rows_used)


# -- without a look at the cache


def random_policy(context: PolicyContext) -> RoutingPolicy:
    source = random.Random(context.seed)
    return TwoPicks(lambda _, instances: source.choice(instances), lambda _, instances: source.choice(instances))


class _Turns:
    """The next in turn of those that fit."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, query: Query, instances: Sequence[Instance]) -> Instance:
        self._turn += 1
        return instances[self._turn % len(instances)]


def round_robin(context: PolicyContext) -> RoutingPolicy:
    return TwoPicks(_Turns(), _Turns())


def least_loaded(context: PolicyContext) -> RoutingPolicy:
    return TwoPicks(shortest_prefill_queue, fewest_requests)


# -- with one


RETRY_AFTER_MS = 1_000
"""The papers leave it open; nobody comes back in a replay."""

MOONCAKE_BALANCING_THRESHOLD = 2.0
"""Fetch where the best prefix is more than so many times the local one. The paper leaves the number open."""


class Mooncake:
    """Algorithm 1: for each P, TTFT with its own prefix, or with the best one fetched; the least wins; D is the least
    loaded; refuse when TTFT or TBT would break the objective. `threshold` infinite: nothing is fetched, as their
    "local cache-aware" scheduler."""

    def __init__(self, context: PolicyContext, threshold: float = MOONCAKE_BALANCING_THRESHOLD) -> None:
        self._context = context
        self._threshold = threshold

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice] | Refusal:
        prefills = fitting(query, candidates.prefills)
        decodes = [instance for instance in candidates.decodes if can_decode(query, instance)]
        if not prefills or not decodes:
            return []
        source, best = max(query.held.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        prefill = least(query, prefills, lambda instance: self.ttft_us(query, instance, best))
        decode = least(query, decodes, lambda instance: self.tbt_us(query, instance))
        ttft_us, tbt_us = self.ttft_us(query, prefill, best), self.tbt_us(query, decode)
        if ttft_us > self._context.slo_ttft_us or tbt_us > self._context.slo_tpot_us:
            reason = f"TTFT {ttft_us / 1e6:.2f} s, TBT {tbt_us / 1e3:.1f} ms predicted"
            return Refusal(reason=reason, resource="predicted latency", retry_after_ms=RETRY_AFTER_MS)
        local = query.held.get(prefill.uuid, 0)
        if not self.fetches(local, best):
            return [pair_choice(query, prefill, decode)]
        self._context.notes.fetches[query.request.key] = Fetch(source, prefill.uuid, best // prefill.block_size)
        missing = query.request.tokens_known - best
        return [_choice(query, prefill, decode, missing, best, ttft_us)]

    def fetches(self, local: int, best: int) -> bool:
        return math.isfinite(self._threshold) and best > local * self._threshold

    def ttft_us(self, query: Query, instance: Instance, best: int) -> float:
        cost, local = self._context.cost, query.held.get(instance.uuid, 0)
        queue_us = instance.tokens_queued * cost.prefill.token_us
        known = query.request.tokens_known
        if not self.fetches(local, best):
            return queue_us + cost.prefill.us(known - local, local)
        transfer_us = self._context.link.us((best - local) * cost.kv_token_bytes)
        return transfer_us + queue_us + cost.prefill.us(known - best, best)

    def tbt_us(self, query: Query, instance: Instance) -> float:
        kv_tokens = instance.pages_used * instance.block_size + query.request.tokens_known
        return self._context.cost.decode.us(instance.rows_used + 1, kv_tokens)


DYNAMO_LOCAL_TOKENS = 2_048
DYNAMO_LOCAL_SHARE = 0.7


class Dynamo:
    """KV router: max((active prefill tokens + input) / block - hits, 0) + decode blocks, the least wins. `temperature`
    0 is argmin, else softmax over normalised costs. Prompts with little to compute are prefilled at D."""

    def __init__(self, context: PolicyContext, temperature: float = 0.0) -> None:
        self._random = random.Random(context.seed)
        self._temperature = temperature

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice]:
        if not candidates.prefills:
            locals_ = fitting(query, candidates.locals)
            return [local_choice(query, self._pick(query, locals_))] if locals_ else []
        prefills = fitting(query, candidates.prefills)
        decodes = [instance for instance in candidates.decodes if can_decode(query, instance)]
        if not prefills or not decodes:
            return []
        decode = self._pick(query, decodes)
        uncached = query.request.tokens_known - query.held.get(decode.uuid, 0)
        if uncached < DYNAMO_LOCAL_TOKENS and uncached / query.request.tokens_known < DYNAMO_LOCAL_SHARE:
            return [local_choice(query, decode)]
        return [pair_choice(query, self._pick(query, prefills), decode)]

    def cost_blocks(self, query: Query, instance: Instance) -> float:
        size = instance.block_size
        prefill = (instance.tokens_queued + query.request.tokens_known) / size
        hits = query.held.get(instance.uuid, 0) / size
        return max(prefill - hits, 0.0) + instance.pages_used

    def _pick(self, query: Query, instances: Sequence[Instance]) -> Instance:
        costs = [self.cost_blocks(query, instance) for instance in instances]
        low, high = min(costs), max(costs)
        if self._temperature <= 0.0 or low == high:
            return least(query, instances, lambda instance: self.cost_blocks(query, instance))
        weights = [2.718281828459045 ** (-(cost - low) / (high - low) / self._temperature) for cost in costs]
        return self._random.choices(instances, weights)[0]


SGLANG_IMBALANCE_REQUESTS = 64
SGLANG_IMBALANCE_RATIO = 1.5
SGLANG_MATCH = 0.3


def sglang_pick(query: Query, instances: Sequence[Instance]) -> Instance:
    """Out of balance: fewest requests; else the best match if it is good enough; else fewest requests."""
    loads = [instance.rows_used for instance in instances]
    if max(loads) - min(loads) > SGLANG_IMBALANCE_REQUESTS and max(loads) > SGLANG_IMBALANCE_RATIO * min(loads):
        return fewest_requests(query, instances)
    best = least(query, instances, lambda instance: -query.held.get(instance.uuid, 0))
    if query.held.get(best.uuid, 0) / query.request.tokens_known > SGLANG_MATCH:
        return best
    return fewest_requests(query, instances)


def sglang(context: PolicyContext) -> RoutingPolicy:
    return TwoPicks(sglang_pick, fewest_requests)


def llm_d(context: PolicyContext) -> RoutingPolicy:
    return TwoPicks(StickyUntilSaturated(context.cost), fewest_requests)


def llm_d_precise(_: PolicyContext) -> RoutingPolicy:
    return TwoPicks(highest_score, fewest_requests)


def _early_rejection(context: PolicyContext, **form: Any) -> RoutingPolicy:
    from simulator.early_rejection import EarlyRejection

    return EarlyRejection(context, **form)


POLICIES: Mapping[str, Callable[[PolicyContext], RoutingPolicy]] = {
    "segue": lambda _: JointPolicy(),
    "random": random_policy,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "mooncake": Mooncake,
    "mooncake-local": lambda context: Mooncake(context, threshold=math.inf),
    "mooncake-baseline": lambda context: _early_rejection(context, at_arrival=False, at_landing=True),
    "mooncake-early": lambda context: _early_rejection(context),
    "mooncake-early-checked": lambda context: _early_rejection(context, at_landing=True),
    "mooncake-predicted": lambda context: _early_rejection(context, uniform_decode_us=context.uniform_decode_us),
    "mooncake-predicted-checked": lambda context: _early_rejection(
        context, uniform_decode_us=context.uniform_decode_us, at_landing=True
    ),
    "dynamo": Dynamo,
    "sglang": sglang,
    "llm-d": llm_d,
    "llm-d-precise": llm_d_precise,
}


def make_policy(name: str, context: PolicyContext) -> RoutingPolicy:
    """Raises ValueError that lists the known names."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name](context)
