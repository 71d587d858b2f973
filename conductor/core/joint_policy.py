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

from collections.abc import Callable, Mapping, Sequence

from conductor.core.demand import MemoryDemand, PrefillDemand
from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import Choice, Query, can_compute_locally, can_decode, can_prefill, computes_at_decode
from conductor.core.pricing import loss
from conductor.core.rendezvous import weight
from conductor.core.sides import DecodeSide, PrefillSide, Supply, Weigher

SIDE_CANDIDATES_MAX = 4
"""Of the least loaded, and as many of the longest prefixes: at most 8 x 8 pairs instead of 128 x 128."""

LOCAL_GAP_LOSS = 0.02
"""A prefill between decode steps is one long gap for every row, which a mean over steps does not show: it has to be
worth 2 % of an objective."""


class JointPolicy:
    """Remembers nothing but the recent demand for prefill time and memory."""

    def __init__(self) -> None:
        self._prefill = PrefillDemand()
        self._memory = MemoryDemand()

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice]:
        self._look(query, candidates)
        decodes = len(candidates.locals or candidates.decodes)
        weigher = Weigher(query, self._prefill, self._memory, health, _supply(query, candidates), decodes)
        choices = _pairs(weigher, candidates) + _locals(weigher, candidates)
        return sorted(choices, key=lambda choice: (choice.cost, -_choice_weight(query.tie_hash, choice)))

    def _look(self, query: Query, candidates: Candidates) -> None:
        self._prefill.look(query.now_us, candidates.prefills or candidates.locals, query.requests_waiting)
        pool = candidates.locals or candidates.decodes
        if not pool:
            return
        rows = sum(instance.rows_used for instance in pool) / len(pool)
        kv_tokens = sum(instance.kv_tokens_used for instance in pool) / len(pool)
        share = sum(instance.prefill_share(query.now_us) for instance in pool) / len(pool)
        step_us = query.beliefs.cost.decode.us(max(1, round(rows)), kv_tokens) / (1.0 - share)
        self._memory.look(query.now_us, pool, query.tokens_answer * step_us)


def _pairs(weigher: Weigher, candidates: Candidates) -> list[Choice]:
    query, now_us = weigher.query, weigher.query.now_us
    sources = _shortlist(query, candidates.prefills, query.held_soon, can_prefill, _prefill_load(weigher))
    targets = _shortlist(query, candidates.decodes, query.held, can_decode, _decode_load(weigher))
    ramps = any(instance.is_warm(now_us) for instance in candidates.prefills)
    prefills = [weigher.prefill(instance, ramps) for instance in sources]
    ramps = any(instance.is_warm(now_us) for instance in candidates.decodes)
    decodes = [weigher.decode(instance, ramps) for instance in targets]
    return [_pair(weigher, prefill, decode) for prefill in prefills for decode in decodes]


def _locals(weigher: Weigher, candidates: Candidates) -> list[Choice]:
    query, now_us = weigher.query, weigher.query.now_us
    pool = [*candidates.locals, *(candidates.decodes if candidates.prefills else ())]
    chosen = _shortlist(query, pool, query.held_soon, can_compute_locally, _decode_load(weigher))
    ramps = any(instance.is_warm(now_us) for instance in pool)
    return [_local(weigher, instance, ramps, bool(candidates.prefills)) for instance in chosen]


# -- which are costed in full


def _prefill_load(weigher: Weigher) -> Callable[[Instance], float]:
    now_us, token_us = weigher.query.now_us, weigher.cost.prefill.token_us
    return lambda instance: instance.prefill_work.remaining_us(now_us) + instance.others_tokens * token_us


def _decode_load(weigher: Weigher) -> Callable[[Instance], float]:
    now_us, decode = weigher.query.now_us, weigher.cost.decode

    def load(instance: Instance) -> float:
        step_us = instance.rows_used * decode.row_us + instance.kv_tokens_used * decode.kv_token_us
        return (step_us + decode.base_us) / (1.0 - instance.prefill_share(now_us))

    return load


def _shortlist(
    query: Query,
    instances: Sequence[Instance],
    held: Mapping[str, int],
    fits: Callable[[Query, Instance], bool],
    load: Callable[[Instance], float],
) -> list[Instance]:
    """The least loaded that fit, and those that hold most of the prefix; equals in rendezvous order of the prefix."""
    ranked = sorted([(load(instance), instance) for instance in instances], key=lambda entry: entry[0])
    kept: list[tuple[float, Instance]] = []
    for entry in ranked:
        if len(kept) >= SIDE_CANDIDATES_MAX and entry[0] > kept[SIDE_CANDIDATES_MAX - 1][0]:
            break
        if fits(query, entry[1]):
            kept.append(entry)
    if len(kept) > SIDE_CANDIDATES_MAX:
        kept.sort(key=lambda entry: (entry[0], -weight(query.tie_hash, entry[1].stable_hash)))
    chosen = {instance.uuid: instance for _, instance in kept[:SIDE_CANDIDATES_MAX]}
    if held:
        holders = [(-held.get(instance.uuid, 0), value, instance) for value, instance in ranked]
        holders.sort(key=lambda entry: entry[0])  # stable: among equals the least loaded
        places = SIDE_CANDIDATES_MAX
        for tokens, _, instance in holders:
            if not places or not tokens:
                break
            if instance.uuid in chosen or fits(query, instance):
                chosen[instance.uuid] = instance
                places -= 1
    return list(chosen.values())


def _supply(query: Query, candidates: Candidates) -> Supply | None:
    """Whoever holds most of the prompt and can hand it out; among equals the rendezvous order."""
    members = (*candidates.prefills, *candidates.decodes, *candidates.locals)
    able = [instance for instance in members if instance.uuid in query.held and instance.manifest.fetches]
    if not able:
        return None
    best = max(able, key=lambda each: (query.held[each.uuid], weight(query.tie_hash, each.stable_hash)))
    return Supply(best, query.held[best.uuid])


# -- put together


def _pair(weigher: Weigher, prefill: PrefillSide, decode: DecodeSide) -> Choice:
    query = weigher.query
    cost = decode.cost + weigher.link_penalty(prefill.instance, decode.instance)
    if computes_at_decode(query, decode.instance):
        step_us = max(weigher.cost.prefill.us(weigher.known - decode.held, decode.held), decode.tpot_us)
        ttft_us = query.waited_us + step_us + weigher.penalty_us(prefill.instance, ramps=False)
        cost += loss(ttft_us / weigher.ttft_target_us) + weigher.own_tpot(decode.tpot_us, 0.0)
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


def _local(weigher: Weigher, instance: Instance, ramps: bool, beside_prefills: bool) -> Choice:
    prefill, decode = weigher.local(instance, ramps)
    cost = prefill.cost + decode.cost + weigher.own_tpot(decode.tpot_us, 0.0)
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
