"""What the prefill and the decode side of a placement cost, one instance at a time. Formulas: `joint_policy`."""

from __future__ import annotations

import msgspec

from conductor.core.demand import MemoryDemand, PrefillDemand
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import Query, pages_added, pages_short
from conductor.core.pricing import loss

TPOT_SCATTER = 2.0
"""The mean over one answer's steps scatters around its forecast: some answers meet two prefills, most none, and a tenth
of them have two dozen tokens to spread one over. It is judged by its fourth power, whose mean is that of a target so
much tighter (a lognormal with a deviation of .6)."""


class Supply(msgspec.Struct, frozen=True):
    """Where more of the prefix is than anywhere else."""

    instance: Instance
    tokens: int


class PrefillSide(msgspec.Struct, frozen=True, array_like=True):
    instance: Instance
    cost: float
    held: int
    fetched: int
    source: Instance | None
    compute_us: float
    """By the model, the instance's slowness not applied."""
    ttft_us: float


class DecodeSide(msgspec.Struct, frozen=True, array_like=True):
    instance: Instance
    cost: float
    """Without the loss of the request's own TPOT."""
    held: int
    tpot_us: float
    own: float
    """That loss, if nothing delays its landing."""


class Weigher:
    """One decision: its constants, and the cost of each side. `ramps`: fresh instances are spared."""

    def __init__(
        self,
        query: Query,
        prefill_demand: PrefillDemand,
        memory_demand: MemoryDemand,
        health: HealthBook,
        supply: Supply | None,
        decodes: int,
        ramps: bool,
    ) -> None:
        self.query = query
        self._steps: dict[str, tuple[float, float]] = {}
        self._health = health
        self._memory = memory_demand
        self._supply = supply
        self._decodes = decodes
        self._ramps = ramps
        beliefs, self.known = query.beliefs, query.request.tokens_known
        self.cost = cost = beliefs.cost
        self.ttft_target_us = beliefs.targets.ttft_us_of(cost, query.request.tokens_prompt)
        self.tpot_target_us = beliefs.targets.tpot_us / TPOT_SCATTER
        self.answer_tokens = query.tokens_answer
        target_us = beliefs.targets.ttft_us
        self.compute_loss_us = prefill_demand.loss_per_us(target_us)
        token_us = cost.prefill.us(self.known) / max(self.known, 1)
        miss_us = self.compute_loss_us + prefill_demand.slope(target_us)
        self._page_loss_token = beliefs.reuse.share(query.blocks_cached) * token_us * miss_us
        """Of a cached token that goes: somebody waits for its computation, and those behind wait with him."""

    # -- sides

    def prefill(self, instance: Instance) -> PrefillSide:
        """Of computing the prompt at P, with the better of its own and a fetched prefix."""
        held = self.query.held_soon.get(instance.uuid, 0)
        queue_us = self._queue_us(instance) + self.penalty_us(instance)
        fetched, fetch_us = self._fetch(instance, held)
        side = self._prefill(instance, held, 0, queue_us)
        if fetched:
            other = self._prefill(instance, held, fetched, max(queue_us, fetch_us))
            side = other if other.cost < side.cost else side
        return side

    def _prefill(self, instance: Instance, held: int, fetched: int, start_us: float) -> PrefillSide:
        cached = held + fetched
        compute_us = self.cost.prefill.us(self.known - cached, cached)
        taken_us = compute_us * instance.prefill_work.slowness
        ttft_us = self.query.waited_us + start_us + taken_us
        cost = loss(ttft_us / self.ttft_target_us) + taken_us * self.compute_loss_us
        cost += self._eviction(instance, self.known, held)
        source = self._supply.instance if fetched and self._supply is not None else None
        return PrefillSide(instance, cost, held, fetched, source, compute_us, ttft_us)

    def decode(self, instance: Instance) -> DecodeSide:
        """Of decoding at D what another instance has computed."""
        held = self.query.held.get(instance.uuid, 0)
        rows = instance.rows_used
        before_us, after_us = self._steps_us(instance, 0.0)
        cost = self._delay(rows, before_us, after_us) + self._room(instance, held)
        cost += self.penalty_us(instance) / self.ttft_target_us
        return DecodeSide(instance, cost, held, after_us, self.own_tpot(after_us, 0.0))

    def local(self, instance: Instance) -> tuple[PrefillSide, DecodeSide]:
        """Of both at one instance: its rows also lose the time that the prefill takes from them."""
        held = self.query.held_soon.get(instance.uuid, 0)
        queue_us = max(self._queue_us(instance), self.memory_wait_us(instance)) + self.penalty_us(instance)
        fetched, fetch_us = self._fetch(instance, held)
        sides = self._local(instance, held, 0, queue_us)
        if fetched:
            others = self._local(instance, held, fetched, max(queue_us, fetch_us))
            sides = others if others[0].cost + others[1].cost < sides[0].cost + sides[1].cost else sides
        return sides

    def _local(self, instance: Instance, held: int, fetched: int, start_us: float) -> tuple[PrefillSide, DecodeSide]:
        rows, cached = instance.rows_used, held + fetched
        compute_us = self.cost.prefill.us(self.known - cached, cached)
        taken_us = compute_us * instance.prefill_work.slowness
        before_us, after_us = self._steps_us(instance, taken_us / self.answer_tokens)
        chunks = 1 + (self.known - cached) // instance.manifest.max_num_batched_tokens
        ttft_us = self.query.waited_us + start_us + taken_us + (chunks * before_us if rows else 0.0)
        source = self._supply.instance if fetched and self._supply is not None else None
        prefill = PrefillSide(instance, loss(ttft_us / self.ttft_target_us), held, fetched, source, compute_us, ttft_us)
        cost = self._delay(rows, before_us, after_us) + self._room(instance, held)
        cost += self._landing_delay(before_us, taken_us)
        return prefill, DecodeSide(instance, cost, held, after_us, self.own_tpot(after_us, 0.0))

    # -- terms

    def own_tpot(self, step_us: float, wait_us: float) -> float:
        """Of steps of `step_us`, the first of which is `wait_us` late: a short answer has few to spread that over."""
        target_us = self.tpot_target_us
        if not wait_us:
            return loss(step_us / target_us)
        total, answers = 0.0, self.query.answers
        for tokens in answers:
            total += loss((step_us + wait_us / tokens) / target_us)
        return total / len(answers)

    def landing_wait_us(self, ttft_us: float, decode: Instance) -> float:
        """What D has still to prefill for others when the first token is there."""
        return max(0.0, self._queue_us(decode) - ttft_us + self.query.waited_us)

    def memory_wait_us(self, decode: Instance) -> float:
        """Until D has room, where it has none yet."""
        return self._memory.drain_us(max(0, pages_short(self.query, decode)), decode)

    def tail_us(self, prefill: PrefillSide, decode: DecodeSide) -> float:
        """From the first token until D has every page: pages go as they are computed, so what remains is the last
        chunk, or what the link was too slow for."""
        source, target = prefill.instance, decode.instance
        token_bytes = source.manifest.layout.page_bytes / source.block_size
        links, lacking = self.query.beliefs.links, self.known - decode.held
        last = min(lacking, source.manifest.max_num_batched_tokens, self.known - prefill.held - prefill.fetched)
        moving_us = links.us(source.uuid, target.uuid, lacking * token_bytes)
        return max(links.us(source.uuid, target.uuid, last * token_bytes), moving_us - prefill.compute_us)

    def link_penalty(self, prefill: Instance, decode: Instance) -> float:
        if not self._health:
            return 0.0
        tokens = self._health.penalty_tokens(self.query.now_us, prefill.uuid, decode.uuid)
        return tokens * self.cost.prefill.token_us / self.ttft_target_us

    def penalty_us(self, instance: Instance) -> float:
        """Being ill, or fresh, as a delay."""
        if not self._ramps and not self._health:
            return 0.0
        now_us = self.query.now_us
        tokens = self._health.penalty_tokens(now_us, instance.uuid)
        if self._ramps:
            tokens += instance.ramp_tokens(now_us)
        return tokens * self.cost.prefill.token_us * instance.prefill_work.slowness

    def _queue_us(self, instance: Instance) -> float:
        work = instance.prefill_work
        others_us = instance.others_tokens * self.cost.prefill.token_us * work.slowness
        return work.remaining_us(self.query.now_us) + others_us

    def _fetch(self, instance: Instance, held: int) -> tuple[int, float]:
        """Tokens worth asking the supply for, and how long they take to come."""
        supply = self._supply
        if supply is None or not instance.manifest.fetches or supply.instance is instance:
            return 0, 0.0
        fetched = supply.tokens - held
        if fetched < instance.block_size:
            return 0, 0.0
        token_bytes = instance.manifest.layout.page_bytes / instance.block_size
        return fetched, self.query.beliefs.links.us(supply.instance.uuid, instance.uuid, fetched * token_bytes)

    def _steps_us(self, instance: Instance, gap_us: float) -> tuple[float, float]:
        """A decode step before and after the request has joined, prefills between the steps included. `gap_us` is what
        a further prefill adds to each step of those who wait for its end, averaged over an answer."""
        steps = self._steps.get(instance.uuid)
        if steps is None:
            decode, rows, kv_tokens = self.cost.decode, instance.rows_used, instance.kv_tokens_used
            stretch = 1.0 / (1.0 - instance.prefill_share(self.query.now_us))
            after_us = decode.us(rows + 1, kv_tokens + self.known + self.answer_tokens // 2) * stretch
            steps = self._steps[instance.uuid] = decode.us(rows, kv_tokens) * stretch, after_us
        return steps[0], steps[1] + gap_us

    def _delay(self, rows: int, before_us: float, after_us: float) -> float:
        return rows * (loss(after_us / self.tpot_target_us) - loss(before_us / self.tpot_target_us))

    def _landing_delay(self, step_us: float, taken_us: float) -> float:
        """Of those who land while the prompt is computed: on average half of it stands between their first tokens."""
        landing = self._memory.arrivals(taken_us, self._decodes)
        return landing * (self.own_tpot(step_us, taken_us / 2) - self.own_tpot(step_us, 0.0))

    def _room(self, instance: Instance, held: int) -> float:
        """Of the memory that the request takes: what is evicted, and the wait of those who find the pool full."""
        tokens = self.known + self.query.tokens_growth
        pages = pages_added(self.query, instance, tokens)
        waiting = self._memory.loss(pages, instance, self.query.beliefs.targets.ttft_us)
        return waiting + self._eviction(instance, tokens, held)

    def _eviction(self, instance: Instance, tokens: int, held: int) -> float:
        evicted = instance.pages_for(tokens) - held // instance.block_size - instance.pages_free
        return evicted * instance.block_size * self._page_loss_token if evicted > 0 else 0.0
