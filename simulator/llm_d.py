"""llm-d's two published rules for choosing among instances that prefill and decode, or among prefill instances.

*Sticky until saturated*: stay on instances with most of the prompt, until a cold one would answer much sooner.

*Precise*, the configuration of its benchmark on shared-prefix groups: three scores between 0 and 1, weighed and added,
the highest sum wins. The prefix score is the longest matched prefix as KV events tell it, scaled so that the best
instance has 1 and the worst 0; the memory score is the share of KV memory that nobody uses; the queue score is 1 for
the shortest queue of waiting requests and 0 for the longest. Memory and queue are what an instance last reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conductor.core.instance import Instance
from conductor.core.policy import Query
from conductor.core.rendezvous import weight
from segue.cost_model import CostModel

STICKY_MATCH = 0.8
STICKY_PATIENCE_US = 1_000_000.0
"""T_max. Published as a parameter; a second keeps a group together through a burst."""

PREFIX_WEIGHT, MEMORY_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0, 2.0


class StickyUntilSaturated:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def __call__(self, query: Query, instances: Sequence[Instance]) -> Instance:
        known = query.request.tokens_known
        cold = _least(query, instances, lambda instance: instance.tokens_queued)
        warm = [each for each in instances if query.held_soon.get(each.uuid, 0) >= STICKY_MATCH * known]
        if not warm:
            return cold
        best = _least(query, warm, lambda instance: self.ttft_us(query, instance))
        late_us = self.ttft_us(query, best) - self.ttft_us(query, cold)
        return cold if late_us > STICKY_PATIENCE_US else best

    def ttft_us(self, query: Query, instance: Instance) -> float:
        held = query.held_soon.get(instance.uuid, 0)
        queue_us = instance.tokens_queued * self._cost.prefill.token_us
        return queue_us + self._cost.prefill.us(query.request.tokens_known - held, held)


def highest_score(query: Query, instances: Sequence[Instance]) -> Instance:
    """The precise rule."""
    matched = [float(query.held.get(each.uuid, 0)) for each in instances]
    queued = [0.0 if each.load is None else float(each.load.waiting) for each in instances]
    scores = {
        each.uuid: PREFIX_WEIGHT * prefix + MEMORY_WEIGHT * _memory_free(each) + QUEUE_WEIGHT * (1.0 - queue)
        for each, prefix, queue in zip(instances, _scaled(matched, equal=1.0), _scaled(queued, equal=0.0), strict=True)
    }
    return _least(query, instances, lambda instance: -scores[instance.uuid])


def _memory_free(instance: Instance) -> float:
    load = instance.load
    if load is None:
        return 1.0
    return 1.0 - (load.pages_active + load.pages_held + load.pages_quarantined) / load.pages_total


def _scaled(values: Sequence[float], *, equal: float) -> list[float]:
    """From 0 for the least to 1 for the greatest; `equal` where there is no difference."""
    low, high = min(values), max(values)
    return [equal if high == low else (value - low) / (high - low) for value in values]


def _least(query: Query, instances: Sequence[Instance], score: Callable[[Instance], float]) -> Instance:
    return min(instances, key=lambda instance: (score(instance), -weight(query.tie_hash, instance.stable_hash)))
