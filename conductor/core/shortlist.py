"""Which instances of a pool are worth a full look: a few of the least loaded, a few of the longest prefixes.

One cheap number for each instance orders the pool; whether a request fits is asked only along that order. With 128
instances in a pool this takes some 30 us where no two are equally loaded, and about 100 us where all are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from conductor.core.instance import Instance
from conductor.core.policy import Query
from conductor.core.rendezvous import weights

SHORTLIST = 4
"""Of either kind."""

HOLDERS_SEEN = 16
"""Longest prefixes, or equals, looked at until SHORTLIST of them fit."""

Fits = Callable[[Query, Instance], bool]


def least_loaded(query: Query, pool: Sequence[Instance], loads: Sequence[float], fits: Fits) -> list[Instance]:
    """At most SHORTLIST that fit; equals in rendezvous order of the prefix. `loads` belong to `pool`."""
    order = sorted(range(len(pool)), key=loads.__getitem__)
    chosen: list[Instance] = []
    place = 0
    while place < len(order) and len(chosen) < SHORTLIST:
        end = bisect_right(order, loads[order[place]], lo=place, key=loads.__getitem__)
        equals = [pool[index] for index in order[place:end]]
        if len(equals) > 1:
            order_of = weights(query.tie_hash, [instance.stable_hash for instance in equals])
            ranked = sorted(range(len(equals)), key=order_of.__getitem__, reverse=True)
            equals = [equals[index] for index in ranked[:HOLDERS_SEEN]]
        for instance in equals:
            if fits(query, instance):
                chosen.append(instance)
                if len(chosen) == SHORTLIST:
                    break
        place = end
    return chosen


def longest_prefixes(
    query: Query, members: Mapping[str, Instance], held: Mapping[str, int], fits: Fits
) -> list[Instance]:
    """At most SHORTLIST of `members` that hold some of the prompt and fit, the longest prefixes first."""
    chosen: list[Instance] = []
    if held:
        for uuid in sorted(held, key=held.__getitem__, reverse=True)[:HOLDERS_SEEN]:
            instance = members.get(uuid)
            if instance is not None and fits(query, instance):
                chosen.append(instance)
                if len(chosen) == SHORTLIST:
                    break
    return chosen
