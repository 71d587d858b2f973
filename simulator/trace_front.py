"""The gateway of a trace replay: submits requests when they arrive, keeps what was observed of each.

It follows the rules of `conductor.gateway.session` (attempt numbers, re-planning with the tokens so far, one end), but
keeps times instead of text, a step's tokens at once: a replay has millions of them.
"""

from __future__ import annotations

from array import array
from enum import Enum

from conductor.core.events import RequestArrived
from segue.block_hash import block_hashes, token_bytes
from segue.errors import RequestError
from segue.ids import AttemptRef, InstanceRef
from segue.limits import ATTEMPTS_MAX
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, Peer, TokenDelta
from simulator.conductor import Conductor
from simulator.event_heap import EventHeap, Rank
from simulator.prompt_tokens import PromptTokens
from simulator.workload import Workload

REPLAN_DELAYS_US = (0, 0, 100_000, 400_000, 1_600_000)
"""As the gateway's."""


class End(Enum):
    RUNNING = "running"
    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"


class Observed:
    """One request as its client sees it. Times are virtual microseconds; 0: did not happen."""

    __slots__ = (
        "arrival_us",
        "attempt",
        "decode",
        "end",
        "first_token_us",
        "generated",
        "handoff_us",
        "index",
        "placed_us",
        "prefill",
        "prefill_started_us",
        "reason",
        "times_us",
        "token_ids",
        "tokens_cached",
        "tokens_prompt",
    )

    def __init__(self, index: int, arrival_us: int, tokens_prompt: int) -> None:
        self.index = index
        self.arrival_us = arrival_us
        self.tokens_prompt = tokens_prompt
        self.attempt = 1
        self.end = End.RUNNING
        self.reason = ""
        self.token_ids = b""
        """Of the prompt and earlier attempts, until an instance has them."""
        self.generated: list[int] = []
        self.times_us = array("q")
        """When each generated token reached the gateway."""
        self.placed_us = 0
        self.prefill_started_us = 0
        self.first_token_us = 0
        self.handoff_us = 0
        self.tokens_cached = 0
        self.prefill = ""
        self.decode = ""


class TraceFront:
    """`tokens_max` is what every request may generate at most, as its client would ask; the trace's own length is known
    to the engine alone, unless `tokens_max` is 0: then each asks for just that. `keys` of the requests it owns are
    `start, start + stride, ...`: several fronts share a trace.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        tokens: PromptTokens,
        conductor: Conductor,
        heap: EventHeap,
        *,
        model: str,
        block_size: int,
        hash_root: bytes,
        tokens_max: int,
        start: int = 0,
        stride: int = 1,
        tenants: bool = False,
    ) -> None:
        self.name = name
        self.observed: dict[int, Observed] = {}
        self.ended = 0
        self.total = len(range(start, len(workload.requests), stride))
        self.transit_us = 0
        self._workload = workload
        self._tokens = tokens
        self._conductor = conductor
        self._heap = heap
        self._model = model
        self._block_size = block_size
        self._hash_root = hash_root
        self._tokens_max = tokens_max
        self._stride = stride
        self._tenants = tenants
        conductor.front = self
        if self.total:
            self._await(start)

    # -- arriving and planning

    def _await(self, index: int) -> None:
        arrival_us = self._workload.requests[index].arrival_us
        self._heap.push(max(arrival_us, self._heap.now_us), Rank.ARRIVAL, lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        request = self._workload.requests[index]
        self.observed[index] = Observed(index, self._heap.now_us, request.tokens_prompt)
        self._submit(self.observed[index])
        if index + self._stride < len(self._workload.requests):
            self._await(index + self._stride)

    def _submit(self, seen: Observed) -> None:
        if seen.end is not End.RUNNING:
            return
        seen.token_ids = self._tokens.token_ids(seen.index) + token_bytes(seen.generated)
        self._conductor.post(
            RequestArrived(
                request_id=str(seen.index),
                attempt=seen.attempt,
                model=self._model,
                tokens_prompt=seen.tokens_prompt,
                tokens_known=seen.tokens_prompt + len(seen.generated),
                tokens_max=seen.tokens_prompt + self._tokens_asked(seen),
                hash_root=self._hash_root,
                tenant=self._workload.requests[seen.index].group if self._tenants else "",
                block_hashes=block_hashes(self._hash_root, seen.token_ids, self._block_size),
            )
        )

    def assignment(self, key: AttemptRef, prefill: Peer | None, decode: Peer) -> Assign | None:
        seen = self._live(key)
        if seen is None:
            return None
        token_ids, seen.token_ids = seen.token_ids, b""
        return Assign(
            request_id=key.request_id,
            attempt=key.attempt,
            gateway=self.name,
            token_ids=token_ids,
            tokens_prompt=seen.tokens_prompt,
            sampling=SamplingParams(seed=seen.index, max_tokens=self._tokens_asked(seen)),
            prefill=prefill,
            decode=decode,
            hash_root=self._hash_root,
        )

    def _tokens_asked(self, seen: Observed) -> int:
        return self._tokens_max or self._workload.requests[seen.index].tokens_output

    # -- what the Conductor says

    def on_placed(self, key: AttemptRef, prefill: str, decode: str) -> None:
        seen = self._live(key)
        if seen is not None:
            seen.prefill, seen.decode = prefill or decode, decode
            seen.placed_us = seen.placed_us or self._heap.now_us

    def on_handoff_complete(self, key: AttemptRef) -> None:
        seen = self._live(key)
        if seen is not None:
            seen.handoff_us = seen.handoff_us or self._heap.now_us

    def on_rejected(self, key: AttemptRef, error: RequestError) -> None:
        seen = self._live(key)
        if seen is None:
            return
        if seen.attempt == 1:
            self._end(seen, End.REJECTED, error.message)
        else:
            self.on_attempt_failed(key, error.message)

    def on_attempt_failed(self, key: AttemptRef, reason: str) -> None:
        seen = self._live(key)
        if seen is None:
            return
        if seen.attempt >= ATTEMPTS_MAX:
            self._end(seen, End.FAILED, reason)
            return
        seen.attempt += 1
        delay_us = REPLAN_DELAYS_US[seen.attempt - 1]
        self._heap.push(self._heap.now_us + delay_us, Rank.ARRIVAL, lambda: self._submit(seen))

    # -- tokens

    def receive(self, source: InstanceRef, instance: str, delta: TokenDelta, times_us: list[int]) -> None:
        seen = self._live(AttemptRef(delta.request_id, delta.attempt))
        if seen is None:
            return
        if delta.finish == "error":
            self._end(seen, End.FAILED, delta.error)
            self._conductor.finish(delta.request_id, "error")
            return
        assert delta.position == seen.tokens_prompt + len(seen.generated), "a position missing or twice"
        transit_us = self._heap.now_us - times_us[-1]
        seen.generated += delta.token_ids
        seen.times_us.extend([at_us + transit_us for at_us in times_us[: len(delta.token_ids)]])
        if not seen.first_token_us and delta.token_ids:
            seen.first_token_us = seen.times_us[0]
            seen.tokens_cached = delta.tokens_cached
            seen.prefill_started_us = max(seen.first_token_us - delta.compute_us - transit_us, seen.placed_us)
        if delta.finish:
            self._end(seen, End.COMPLETED, delta.finish)
            self._conductor.finish(delta.request_id, delta.finish)

    def _end(self, seen: Observed, end: End, reason: str) -> None:
        seen.end, seen.reason = end, reason
        seen.token_ids = b""
        seen.generated = []
        self.ended += 1

    def _live(self, key: AttemptRef) -> Observed | None:
        """The request, while this very attempt is its present one."""
        seen = self.observed.get(int(key.request_id))
        return seen if seen is not None and seen.end is End.RUNNING and seen.attempt == key.attempt else None
