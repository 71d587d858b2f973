"""A gateway for fault runs: the production session of each request, and an oracle that shares no code with it."""

from __future__ import annotations

import struct

import msgspec

from conductor.core.events import RequestArrived
from conductor.gateway import session_events as said
from conductor.gateway.session import Session
from conductor.gateway.text_stream import TextStream
from conductor.ports import Placement, ReceivedTokens
from segue.block_hash import block_hashes, token_bytes
from segue.errors import Cancelled, RequestError
from segue.ids import AttemptRef, InstanceRef
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, Peer, TokenDelta
from simulator.conductor import Conductor
from simulator.event_heap import EventHeap, Rank
from worker_runtime.toy_engine import toy_tokens


class BrokenPromise(Exception):
    """An invariant that a client or an operator relies on does not hold."""


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    arrival_us: int
    prompt: list[int]
    max_tokens: int
    seed: int
    cancel_us: int = 0
    """When its client goes away; 0: stays."""


class Oracle:
    """What the client of one request may see: each token once, in order, the right one; one end; nothing afterwards."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._expected = toy_tokens(request.prompt, request.max_tokens, seed=request.seed)
        self.received: list[int] = []
        self.end = ""

    def take(self, tokens: list[int]) -> None:
        request_id = self._request.request_id
        if self.end:
            raise BrokenPromise(f"request {request_id}: tokens after its end")
        at = len(self.received)
        self.received += tokens
        if self.received != self._expected[: len(self.received)]:
            wanted = self._expected[at : len(self.received)]
            raise BrokenPromise(f"request {request_id}: token {at} and on: got {tokens}, the model says {wanted}")

    def finish(self, reason: str) -> None:
        if self.end:
            raise BrokenPromise(f"request {self._request.request_id}: ended twice, {self.end} and {reason}")
        self.end = reason
        if reason == "length" and len(self.received) != self._request.max_tokens:
            counts = f"{len(self.received)} of {self._request.max_tokens}"
            raise BrokenPromise(f"request {self._request.request_id}: ended by length with {counts} tokens")


class _Nothing:
    """Detokenises nothing: text is another subject."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Live:
    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.oracle = Oracle(request)
        self.sampling = SamplingParams(
            temperature=1.0, seed=request.seed, max_tokens=request.max_tokens, ignore_eos=True
        )
        spec = said.SessionSpec(
            request_id=request.request_id,
            model="toy",
            prompt_ids=token_bytes(request.prompt),
            tokens_prompt=len(request.prompt),
            sampling=self.sampling,
            arrived_us=request.arrival_us,
        )
        self.session = Session(spec, TextStream(_Nothing(), ()))


class SessionFront:
    """Implements `simulator.parts.FrontPort`."""

    def __init__(
        self,
        name: str,
        requests: list[ClientRequest],
        conductor: Conductor,
        heap: EventHeap,
        *,
        block_size: int,
        hash_root: bytes,
    ) -> None:
        self.name = name
        self._conductor = conductor
        self._heap = heap
        self._block_size = block_size
        self._hash_root = hash_root
        self.live = {request.request_id: _Live(request) for request in requests}
        conductor.front = self
        for request in requests:
            heap.push(request.arrival_us, Rank.ARRIVAL, lambda id_=request.request_id: self._submit(id_, 1))  # type: ignore[misc]
            if request.cancel_us:
                heap.push(request.cancel_us, Rank.ARRIVAL, lambda id_=request.request_id: self._cancel(id_))  # type: ignore[misc]

    @property
    def unfinished(self) -> list[str]:
        return [request_id for request_id, live in self.live.items() if not live.oracle.end]

    def ends(self) -> list[str]:
        return [live.oracle.end for live in self.live.values()]

    # -- FrontPort

    def assignment(self, key: AttemptRef, prefill: Peer | None, decode: Peer) -> Assign | None:
        live = self.live[key.request_id]
        if live.oracle.end or live.session.attempt != key.attempt:
            return None
        return Assign(
            request_id=key.request_id,
            attempt=key.attempt,
            gateway=self.name,
            token_ids=self._tokens_known(live),
            tokens_prompt=len(live.request.prompt),
            sampling=live.sampling,
            prefill=prefill,
            decode=decode,
            hash_root=self._hash_root,
        )

    def on_placed(self, key: AttemptRef, prefill: str, decode: str) -> None:
        self._step(key.request_id, said.Placed(key.attempt, Placement(prefill=prefill, decode=decode)))

    def on_rejected(self, key: AttemptRef, error: RequestError) -> None:
        self._step(key.request_id, said.Rejected(key.attempt, error))

    def on_attempt_failed(self, key: AttemptRef, reason: str) -> None:
        self._step(key.request_id, said.AttemptFailed(key.attempt, reason))

    def on_handoff_complete(self, key: AttemptRef) -> None:
        self._step(key.request_id, said.HandoffComplete(key.attempt))

    def receive(self, source: InstanceRef, instance: str, delta: TokenDelta, times_us: list[int]) -> None:
        received = ReceivedTokens(
            ref=source,
            instance=instance,
            request_id=delta.request_id,
            attempt=delta.attempt,
            position=delta.position,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish=delta.finish,
            error=delta.error,
            tokens_cached=delta.tokens_cached,
            from_prefill=delta.from_prefill,
            queue_us=delta.queue_us,
            compute_us=delta.compute_us,
        )
        self._step(delta.request_id, received)

    # -- one request

    def _step(self, request_id: str, *events: said.Event) -> None:
        live = self.live[request_id]
        for decision in live.session.step(self._heap.now_us, events):
            match decision:
                case said.Emit(token_ids=tokens):
                    live.oracle.take(tokens)
                case said.Replan(attempt=attempt, delay_us=delay_us):
                    at_us = self._heap.now_us + delay_us
                    self._heap.push(at_us, Rank.ARRIVAL, lambda n=attempt: self._submit(request_id, n))  # type: ignore[misc]
                case said.End(reason=reason):
                    live.oracle.finish(reason)
                    self._conductor.finish(request_id, reason)
        live.session.check()
        wakeup_us = live.session.next_wakeup()
        if wakeup_us is not None:
            self._heap.push(max(wakeup_us, self._heap.now_us), Rank.TIMER, lambda: self._look(request_id, wakeup_us))

    def _look(self, request_id: str, planned_us: int) -> None:
        if self.live[request_id].session.next_wakeup() == planned_us:
            self._step(request_id)

    def _submit(self, request_id: str, attempt: int) -> None:
        live = self.live[request_id]
        if live.oracle.end or live.session.attempt != attempt:
            return
        self._step(request_id, said.Submitted(attempt))
        token_ids = self._tokens_known(live)
        prompt = len(live.request.prompt)
        self._conductor.post(
            RequestArrived(
                request_id=request_id,
                attempt=attempt,
                model="toy",
                tokens_prompt=prompt,
                tokens_known=len(token_ids) // 4,
                tokens_max=prompt + live.request.max_tokens,
                hash_root=self._hash_root,
                block_hashes=block_hashes(self._hash_root, token_ids, self._block_size),
            )
        )

    def _cancel(self, request_id: str) -> None:
        if not self.live[request_id].oracle.end:
            self._step(request_id, said.Stopped(Cancelled("the client went away")))

    def _tokens_known(self, live: _Live) -> bytes:
        return struct.pack(
            f"<{len(live.request.prompt) + len(live.session.generated)}I",
            *live.request.prompt,
            *live.session.generated,
        )
