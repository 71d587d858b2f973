"""From an attempt to a choice of instances, or to the reason why there is none (now, or ever)."""

from __future__ import annotations

from conductor.core.attempts import Attempts
from conductor.core.beliefs import Beliefs
from conductor.core.decisions import Reject
from conductor.core.events import RequestArrived
from conductor.core.fleet import Candidates, Fleet
from conductor.core.growth import GrowthPredictor
from conductor.core.health import HealthBook
from conductor.core.latency import LatencyForecast
from conductor.core.policy import Choice, Query, Refusal, RoutingPolicy, usable_tokens
from conductor.core.rendezvous import stable_hash
from segue.errors import InvalidField, Overloaded, Unavailable, UnknownModel
from segue.ids import AttemptRef
from segue.prefix_index import PrefixIndex


def misfit(request: RequestArrived, candidates: Candidates) -> Reject | None:
    """The rejection of a request that no instance could ever hold, however idle."""
    longest, longest_prompt = candidates.tokens_longest, candidates.tokens_longest_prompt
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
    """Reads the core's state; what prompts look for in vain is all that it notes."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        attempts: Attempts,
        health: HealthBook,
        growth: GrowthPredictor,
        policy: RoutingPolicy,
        beliefs: Beliefs,
        forecast: LatencyForecast,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._attempts = attempts
        self._health = health
        self._growth = growth
        self._policy = policy
        self._beliefs = beliefs
        self._forecast = forecast

    def refusal(self, request: RequestArrived) -> Reject | None:
        """Why `request` cannot be served by the cluster as it is; None: it is a matter of room."""
        if not self._fleet.is_known(request.model):
            message = f"model {request.model!r} is not served here"
            return Reject(key=request.key, code=UnknownModel.code, message=message)
        group = self._fleet.group_of_root(request.model, request.kv_root)
        if group is None:
            return Reject(key=request.key, code=Unavailable.code, message=self._fleet.unavailability(request.model))
        return misfit(request, group.candidates)

    def growth_tokens(self, request: RequestArrived) -> int:
        """What to make room for: a sequence that grows evenly holds half of its growth over its stay, and those
        beside it are at other points of theirs. Where they are not, load reports show more than was booked."""
        return -(-self._growth.predict(*_generated_and_left(request)) // 2)

    def ranked(
        self, request: RequestArrived, now_us: int, *, waited_us: int, requests_waiting: int
    ) -> list[Choice] | Refusal:
        """Choices that have room now, best first. `refusal` returned None in this step."""
        group = self._fleet.group_of_root(request.model, request.kv_root)
        assert group is not None, "refusal() was asked first"
        held = self._index.match(request.block_hashes)
        held_soon = dict(held)
        for uuid, blocks in self._attempts.expected.match(request.block_hashes).items():
            held_soon[uuid] = max(blocks, held.get(uuid, 0))
        found = max(held_soon.values(), default=0)
        self._beliefs.reuse.note_wanted(request.block_hashes, found)
        block_size = group.representative.layout.block_size
        query = Query(
            request=request,
            tokens_growth=self.growth_tokens(request),
            answers=self._growth.spread(*_generated_and_left(request)),
            tokens_answer=max(1, self._growth.expect(*_generated_and_left(request))),
            held=usable_tokens(held, block_size, request.tokens_known),
            held_soon=usable_tokens(held_soon, block_size, request.tokens_known),
            blocks_in_use=self._attempts.in_use.match(request.block_hashes),
            now_us=now_us,
            tie_hash=stable_hash(request.block_hashes[0] if request.block_hashes else request.request_id.encode()),
            waited_us=waited_us,
            requests_waiting=requests_waiting,
            blocks_cached=self._index.entries(),
            beliefs=self._forecast.corrected(request.model, self._beliefs),
        )
        return self._policy.rank(query, group.candidates, self._health)

    def next_hold_end(self, now_us: int) -> int | None:
        """When the next instance that refused may be asked again."""
        ends_us = (instance.refused_until_us for instance in self._fleet.instances.values())
        return min((end_us for end_us in ends_us if end_us > now_us), default=None)


def _generated_and_left(request: RequestArrived) -> tuple[int, int]:
    return request.tokens_known - request.tokens_prompt, max(0, request.tokens_max - request.tokens_known)


def reject_of(request: RequestArrived, refusal: Refusal) -> Reject:
    return Reject(
        key=request.key,
        code=Overloaded.code,
        message=refusal.reason,
        resource=refusal.resource,
        retry_after_ms=refusal.retry_after_ms,
    )


def rides_out(request: RequestArrived, reject: Reject) -> bool:
    """A stream that already runs waits in the queue for the only instance to come back."""
    return reject.code == Unavailable.code and request.attempt > 1


def _invalid(key: AttemptRef, field: str, message: str) -> Reject:
    return Reject(key=key, code=InvalidField.code, field=field, message=message)
