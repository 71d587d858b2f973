"""The default policy: source of the prefix, prefill and decode instance are chosen together, by the loss they cause.

For a pair (P, D), with the losses of `pricing` and all times predicted by the cost model:

    TTFT = waited + max(queue at P, fetch from the source) + prefill of the rest
    TPOT = a step of D with the request in it and D's own prefills between the steps, + tail of the hand-off / answer
    cost = loss(TTFT) + loss(TPOT)
         + what D's rows lose by slower steps
         + prefill time * what a microsecond of it costs those who wait for prefill (`demand`)
         + evicted pages * what a page is worth (`reuse`)
         + wait of those who find D's memory full

For a local prefill the queue and the prefill are D's own, and D's rows lose the steps that it takes from them. "Fetch
nothing" is always a candidate source and "prefill locally" always a candidate pair. Where D lacks at most one block it
computes the rest itself and P is let go.

The cost is a term for P plus one for D plus the tail of the pair, so the best few of either side are paired up: those
with the longest prefixes and those with the least load. Only they are costed in full.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.core.demand import MemoryDemand, PrefillDemand
from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import (
    Choice,
    Query,
    can_compute_locally,
    can_decode,
    can_prefill,
    computes_at_decode,
    pages_short,
)
from conductor.core.pricing import loss
from conductor.core.rendezvous import weight
from conductor.core.shortlist import least_loaded, longest_prefixes
from conductor.core.sides import DecodeSide, PrefillSide, Supply, Weigher

PAIRED_MAX = 3
"""Best prefill and decode instances that are paired up."""

OVERBOOKED_SHARE = 0.25
"""Pages that an instance without prefill instances beside it may have booked beyond those it has. Room is booked for
half of every answer's growth, which is there for a while yet, and a request that waits for the one instance with its
prefix would hold up here those who want others. What is more waits here, where it can still be placed anywhere."""

LOOK_EVERY_US = 10_000
"""Demand is a mean over seconds; looking at every instance for each request of a burst adds nothing to it."""

LOCAL_GAP_LOSS = 0.02
"""A prefill between decode steps is one long gap for every row, which a mean over steps does not show: it has to be
worth 2 % of an objective."""


class JointPolicy:
    """Remembers nothing but the recent demand for prefill time and memory."""

    def __init__(self) -> None:
        self._prefill = PrefillDemand()
        self._memory = MemoryDemand()
        self._looked_us: int | None = None
        self._ramps = False
        """Whether fresh instances are spared: not while a whole cluster starts."""

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice]:
        if self._looked_us is None or query.now_us - self._looked_us >= LOOK_EVERY_US:
            self._look(query, candidates)
        decodes = len(candidates.locals or candidates.decodes)
        weigher = Weigher(query, self._prefill, self._memory, health, _supply(query, candidates), decodes, self._ramps)
        pool = candidates.locals or candidates.decodes
        loads = _decode_loads(weigher, pool)
        choices = _locals(weigher, candidates, pool, loads)
        if candidates.prefills and candidates.decodes:
            choices += _pairs(weigher, candidates, loads)
        choices.sort(key=lambda choice: (choice.cost, -_choice_weight(query.tie_hash, choice)))
        if choices and not _is_ready(query, choices[0]):
            return []
        return [choice for choice in choices if _is_ready(query, choice)]

    def _look(self, query: Query, candidates: Candidates) -> None:
        now_us = query.now_us
        self._looked_us = now_us
        pool = candidates.locals or candidates.decodes
        self._ramps = any(each.is_warm(now_us) for members in (candidates.prefills, pool) for each in members)
        self._prefill.look(now_us, candidates.prefills or candidates.locals, query.requests_waiting)
        if pool:
            self._memory.look(now_us, pool, query.tokens_answer * _mean_step_us(query, pool))


def _mean_step_us(query: Query, pool: Sequence[Instance]) -> float:
    """Of the mean batch of the pool."""
    rows, kv_tokens, share = 0, 0, 0.0
    for each in pool:
        rows += each.booked_rows + each.others_rows
        kv_tokens += each.booked_kv_tokens + each.others_kv_tokens
        share += each.prefill_share(query.now_us)
    count = len(pool)
    return query.beliefs.cost.decode.us(max(1, round(rows / count)), kv_tokens / count) / (1.0 - share / count)


def _pairs(weigher: Weigher, candidates: Candidates, decode_loads: Sequence[float]) -> list[Choice]:
    query, pool = weigher.query, candidates.prefills
    loads: list[float] = [instance.booked_tokens + instance.others_tokens for instance in pool]
    sources = least_loaded(query, pool, loads, can_prefill)
    sources += longest_prefixes(query, candidates.prefills_by_uuid, query.held_soon, can_prefill)
    if candidates.locals:
        decode_loads = _decode_loads(weigher, candidates.decodes)
    targets = least_loaded(query, candidates.decodes, decode_loads, can_decode)
    targets += longest_prefixes(query, candidates.decodes_by_uuid, query.held, can_decode)
    prefills = [weigher.prefill(instance) for instance in _once(sources)]
    decodes = [weigher.decode(instance) for instance in _once(targets)]
    if len(prefills) > PAIRED_MAX:
        prefills.sort(key=lambda side: side.cost)
    if len(decodes) > PAIRED_MAX:
        whole = [instance.uuid for instance in _once(targets) if computes_at_decode(query, instance)]
        decodes.sort(key=lambda side: (side.instance.uuid not in whole, side.cost + side.own))
    return [_pair(weigher, prefill, decode) for prefill in prefills[:PAIRED_MAX] for decode in decodes[:PAIRED_MAX]]


def _locals(weigher: Weigher, candidates: Candidates, pool: Sequence[Instance], loads: Sequence[float]) -> list[Choice]:
    query = weigher.query
    fits = can_decode if candidates.prefills else can_compute_locally
    chosen = least_loaded(query, pool, loads, fits)
    chosen += longest_prefixes(query, candidates.decodes_by_uuid, query.held_soon, fits)
    return [_local(weigher, instance, bool(candidates.prefills)) for instance in _once(chosen)]


def _decode_loads(weigher: Weigher, pool: Sequence[Instance]) -> list[float]:
    """Time of a step without its weights, and what a prefill that waits there adds to each of an answer's."""
    row_us, kv_token_us = weigher.cost.decode.row_us, weigher.cost.decode.kv_token_us
    token_us = weigher.cost.prefill.token_us / weigher.answer_tokens
    return [
        (each.booked_rows + each.others_rows) * row_us
        + (each.booked_kv_tokens + each.others_kv_tokens) * kv_token_us
        + (each.booked_tokens + each.others_tokens) * token_us
        for each in pool
    ]


def _is_ready(query: Query, choice: Choice) -> bool:
    """Whether the choice can be taken now, or is worth waiting for here. Beside prefill instances all have room: who
    waits for pages at a decode instance keeps those out that another one has computed for."""
    if choice.prefill is not None:
        return True
    return pages_short(query, choice.decode) <= OVERBOOKED_SHARE * choice.decode.manifest.pages_total


def _once(instances: Sequence[Instance]) -> list[Instance]:
    return list({instance.uuid: instance for instance in instances}.values())


def _supply(query: Query, candidates: Candidates) -> Supply | None:
    """Whoever holds most of the prompt and can hand it out; among equals the rendezvous order."""
    best: tuple[int, int, Instance] | None = None
    for uuid, tokens in query.held.items():
        if best is not None and tokens < best[0]:
            continue
        instance = candidates.prefills_by_uuid.get(uuid) or candidates.decodes_by_uuid.get(uuid)
        if instance is not None and instance.manifest.fetches:
            entry = (tokens, weight(query.tie_hash, instance.stable_hash), instance)
            best = entry if best is None or entry[:2] > best[:2] else best
    return None if best is None else Supply(best[2], best[0])


# -- put together


def _pair(weigher: Weigher, prefill: PrefillSide, decode: DecodeSide) -> Choice:
    query = weigher.query
    cost = decode.cost + weigher.link_penalty(prefill.instance, decode.instance)
    if computes_at_decode(query, decode.instance):
        step_us = max(weigher.cost.prefill.us(weigher.known - decode.held, decode.held), decode.tpot_us)
        ttft_us = query.waited_us + step_us + weigher.penalty_us(prefill.instance)
        cost += loss(ttft_us / weigher.ttft_target_us) + decode.own
        return _choice(weigher, prefill, decode, cost, ttft_us, decode.tpot_us, computes=False)
    wait_us = max(weigher.tail_us(prefill, decode), weigher.landing_wait_us(prefill.ttft_us, decode.instance))
    tpot_us = decode.tpot_us + wait_us / weigher.answer_tokens
    cost += prefill.cost + weigher.own_tpot(decode.tpot_us, wait_us)
    return _choice(weigher, prefill, decode, cost, prefill.ttft_us, tpot_us, computes=True)


def _choice(
    weigher: Weigher,
    prefill: PrefillSide,
    decode: DecodeSide,
    cost: float,
    ttft_us: float,
    tpot_us: float,
    *,
    computes: bool,
) -> Choice:
    """`computes` False: D lacks so little that P will be let go."""
    cached = prefill.held + prefill.fetched if computes else decode.held
    return Choice(
        prefill=prefill.instance,
        decode=decode.instance,
        tokens_compute=weigher.known - cached if computes else 0,
        tokens_cached=cached,
        cost=cost,
        held_prefill=prefill.held,
        held_decode=decode.held,
        compute_us=prefill.compute_us if computes else 0.0,
        source=prefill.source if computes else None,
        tokens_fetched=prefill.fetched if computes else 0,
        ttft_us=ttft_us,
        tpot_us=tpot_us,
    )


def _local(weigher: Weigher, instance: Instance, beside_prefills: bool) -> Choice:
    prefill, decode = weigher.local(instance)
    cost = prefill.cost + decode.cost + decode.own
    if beside_prefills:
        cost += LOCAL_GAP_LOSS
    else:
        cost += prefill.compute_us * instance.prefill_work.slowness * weigher.compute_loss_us
    cached = prefill.held + prefill.fetched
    return Choice(
        prefill=None,
        decode=instance,
        tokens_compute=weigher.known - cached,
        tokens_cached=cached,
        cost=cost,
        held_decode=prefill.held,
        compute_us=prefill.compute_us,
        source=prefill.source,
        tokens_fetched=prefill.fetched,
        ttft_us=prefill.ttft_us,
        tpot_us=decode.tpot_us,
    )


def _choice_weight(tie_hash: int, choice: Choice) -> int:
    own = weight(tie_hash, choice.decode.stable_hash)
    return own if choice.prefill is None else own + weight(tie_hash, choice.prefill.stable_hash)
