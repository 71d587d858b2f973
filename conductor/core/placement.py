"""From an attempt to a choice of instances, or to the reason why there is none (now, or ever)."""

from __future__ import annotations

from conductor.core.decisions import Reject
from conductor.core.events import RequestArrived
from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.fleet import Fleet, Group
from conductor.core.growth import GrowthPredictor
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import Candidates, Choice, Query, RoutingPolicy
from segue.errors import InvalidField, Unavailable, UnknownModel
from segue.ids import AttemptRef
from segue.manifest import Role
from segue.prefix_index import PrefixIndex


def candidates_of(fleet: Fleet, group: Group) -> Candidates:
    decodes = group.active(Role.DECODE)
    locals_ = group.active(Role.AGGREGATED)
    if fleet.prefills_locally(group):
        locals_ = locals_ + decodes
    return Candidates(prefills=group.active(Role.PREFILL), decodes=decodes, locals=locals_)


def misfit(request: RequestArrived, candidates: Candidates) -> Reject | None:
    """The rejection of a request that no instance could ever hold, however idle."""
    finishing = [*candidates.locals, *(candidates.decodes if candidates.prefills else ())]
    starting = [*candidates.locals, *candidates.prefills]
    longest = _tokens_capacity(finishing)
    longest_prompt = min(longest, _tokens_capacity(starting))
    if request.tokens_known >= longest_prompt:
        message = f"{request.tokens_known} tokens do not fit: the largest instances hold {longest_prompt}"
        return _invalid(request.key, "prompt", f"{message} and one more is generated")
    if request.tokens_max > longest:
        asked = request.tokens_max - request.tokens_prompt
        limit = longest - request.tokens_prompt
        message = f"{asked} after a prompt of {request.tokens_prompt} tokens do not fit: the limit is {limit}"
        return _invalid(request.key, "max_tokens", message)
    return None


class Placement:
    """Reads the core's state; changes nothing."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        expected: ExpectedPrefixes,
        health: HealthBook,
        growth: GrowthPredictor,
        policy: RoutingPolicy,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._expected = expected
        self._health = health
        self._growth = growth
        self._policy = policy

    def refusal(self, request: RequestArrived) -> Reject | None:
        """Why `request` cannot be served by the cluster as it is; None: it is a matter of room."""
        if not self._fleet.is_known(request.model):
            message = f"model {request.model!r} is not served here"
            return Reject(key=request.key, code=UnknownModel.code, message=message)
        group = self._fleet.group_of_root(request.model, request.kv_root)
        if group is None:
            return Reject(key=request.key, code=Unavailable.code, message=self._fleet.unavailability(request.model))
        return misfit(request, candidates_of(self._fleet, group))

    def growth_tokens(self, request: RequestArrived) -> int:
        generated = request.tokens_known - request.tokens_prompt
        return self._growth.predict(generated, max(0, request.tokens_max - request.tokens_known))

    def best(self, request: RequestArrived, now_us: int) -> Choice | None:
        """The best choice that has room now. `refusal` returned None in this step."""
        group = self._fleet.group_of_root(request.model, request.kv_root)
        assert group is not None, "refusal() was asked first"
        query = Query(
            request=request,
            tokens_growth=self.growth_tokens(request),
            held=self._index.match(request.block_hashes),
            expected=self._expected.match(request.block_hashes),
            now_us=now_us,
            tie_key=request.block_hashes[0] if request.block_hashes else request.request_id.encode(),
        )
        ranked = self._policy.rank(query, candidates_of(self._fleet, group), self._health)
        return ranked[0] if ranked else None

    def next_hold_end(self, now_us: int) -> int | None:
        """When the next instance that refused may be asked again."""
        ends_us = (instance.refused_until_us for instance in self._fleet.instances.values())
        return min((end_us for end_us in ends_us if end_us > now_us), default=None)


def _tokens_capacity(instances: list[Instance]) -> int:
    return max((instance.tokens_capacity for instance in instances), default=0)


def _invalid(key: AttemptRef, field: str, message: str) -> Reject:
    return Reject(key=key, code=InvalidField.code, field=field, message=message)
