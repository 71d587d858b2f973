"""Every live request of this gateway, and the hands of their sessions: submits attempts, arms timers, feeds the fronts.

Inside of the cluster a request is known by its *wire id*: the client's id and a suffix that no other request of any
gateway ever has. A client may use an id again as soon as its request is over, and two gateways may be given the same
one; a late token of the one must never be taken for a token of the other.

Runs on one event loop; nothing here blocks. The Conductor calls back through the GatewayPort methods, TokenLink
through `on_tokens`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from conductor.gateway.hash_chain import HashChain
from conductor.gateway.live_request import LiveRequest
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.request_fields import pack_token_ids
from conductor.gateway.session import Session, State
from conductor.gateway.session_events import (
    AttemptFailed,
    Decision,
    Emit,
    End,
    Event,
    HandoffComplete,
    Placed,
    Rejected,
    Replan,
    SessionSpec,
    Stopped,
    Submitted,
)
from conductor.gateway.text_stream import TextStream
from conductor.ports import ConductorPort, Placement, ReceivedTokens, RoutedRequest
from conductor.tenant_limits import Ticket
from segue import limits
from segue.errors import Cancelled, DuplicateRequest, InternalError, Overloaded, RequestError, Unavailable
from segue.worker_messages import CancelAttempt

log = logging.getLogger(__name__)

RETRY_AFTER_MS = 1000
"""Told to clients that find the table full: about the life of a short request."""


class RequestTable:
    """Implements GatewayPort. `address` is where workers reach this gateway's TokenLink."""

    def __init__(
        self,
        conductor: ConductorPort,
        now_us: Callable[[], int],
        metrics: RequestMetrics,
        end_ticket: Callable[[Ticket], None] = lambda _: None,
    ) -> None:
        self.address = ""
        self.now_us = now_us
        self._conductor = conductor
        self._metrics = metrics
        self._end_ticket = end_ticket
        self._live: dict[str, LiveRequest] = {}
        """By wire id."""
        self._wire_ids: dict[str, str] = {}
        """Of live requests, by the client's id."""
        self._suffix = f"~{secrets.token_hex(4)}"
        self._opened = 0
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    def counts(self) -> tuple[int, int]:
        """(running, waiting): requests whose tokens arrive, and the others."""
        running = sum(live.session.state is State.STREAMING for live in self._live.values())
        return running, len(self._live) - running

    def check_id_free(self, request_id: str) -> None:
        if request_id in self._wire_ids:
            raise DuplicateRequest(f"request id {request_id} belongs to a live request", field="request_id")

    def open(
        self,
        spec: SessionSpec,
        text: TextStream,
        chain: HashChain,
        wake: asyncio.Event,
        ticket: Ticket | None = None,
    ) -> LiveRequest:
        """Take a checked request and submit its first attempt. Raises the RequestError that ends it at once."""
        if self._closing:
            raise Unavailable("this gateway is shutting down")
        self.check_id_free(spec.request_id)
        if len(self._live) >= limits.LIVE_REQUESTS_MAX:
            message = f"{limits.LIVE_REQUESTS_MAX} requests are live at this gateway"
            raise Overloaded(message, resource="live_requests", retry_after_ms=RETRY_AFTER_MS)
        self._opened += 1
        wire_id = f"{spec.request_id}{self._suffix}{self._opened:x}"
        live = self._live[wire_id] = LiveRequest(wire_id, Session(spec, text), chain, wake, ticket)
        self._wire_ids[spec.request_id] = wire_id
        self._submit(live)
        if live.end is not None and live.end.error is not None and not live.session.generated:
            raise live.end.error
        return live

    def stop(self, live: LiveRequest, error: RequestError) -> None:
        """End a request from outside; without effect when it has ended already."""
        if live.end is None:
            self._step(live, (Stopped(error),))

    def cancel(self, request_id: str) -> bool:
        wire_id = self._wire_ids.get(request_id)
        if wire_id is None:
            return False
        self.stop(self._live[wire_id], Cancelled("cancelled by a Cancel call"))
        return True

    def close(self) -> None:
        """End every live request with UNAVAILABLE, which clients may retry elsewhere."""
        self._closing = True
        for live in list(self._live.values()):
            self.stop(live, Unavailable("this gateway is shutting down"))

    def on_placed(self, request_id: str, attempt: int, placement: Placement) -> None:
        self._notify(request_id, Placed(attempt, placement))

    def on_attempt_failed(self, request_id: str, attempt: int, reason: str) -> None:
        self._notify(request_id, AttemptFailed(attempt, reason))

    def on_rejected(self, request_id: str, attempt: int, error: RequestError) -> None:
        self._notify(request_id, Rejected(attempt, error))

    def on_handoff_complete(self, request_id: str, attempt: int) -> None:
        self._notify(request_id, HandoffComplete(attempt))

    def on_tokens(self, received: ReceivedTokens) -> CancelAttempt | None:
        """Returns what to tell an instance that still works for a request, or an attempt, that is over."""
        live = self._live.get(received.request_id)
        if live is None:
            return None if received.finish else CancelAttempt(request_id=received.request_id, reason="request is over")
        attempt = live.session.attempt
        if received.attempt < attempt:
            if received.finish:
                return None
            return CancelAttempt(
                request_id=received.request_id, attempt=received.attempt, reason=f"attempt {attempt} replaced it"
            )
        self._step(live, (received,))
        return None

    def _notify(self, request_id: str, event: Event) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._step(live, (event,))

    def _step(self, live: LiveRequest, events: Sequence[Event]) -> None:
        now_us = self.now_us()
        for decision in self._decide(live, now_us, events):
            match decision:
                case Emit():
                    self._emit(live, now_us, decision)
                case Replan():
                    self._plan_again(live, decision)
                case End():
                    self._finish(live, decision)
        self._arm(live)

    def _emit(self, live: LiveRequest, now_us: int, emit: Emit) -> None:
        tokens = len(emit.token_ids)
        since_us = now_us - live.emitted_us if live.emitted_us else None
        self._metrics.tokens.emitted(live.session.spec.model, tokens, since_us)
        if tokens:
            live.emitted_us = now_us
        if live.ticket is not None:
            live.ticket.uncharged += tokens
        live.put(emit)
        live.wake.set()

    def _decide(self, live: LiveRequest, now_us: int, events: Sequence[Event]) -> list[Decision]:
        """A broken invariant ends this request alone: the caller may be in the middle of a batch of others."""
        try:
            return live.session.step(now_us, events)
        except InternalError as error:
            return live.session.step(now_us, [Stopped(error)])

    def _submit(self, live: LiveRequest) -> None:
        session = live.session
        attempt = session.attempt
        self._step(live, (Submitted(attempt),))
        if live.end is not None:
            return
        try:
            self._conductor.submit(self._routed(live), self)
        except RequestError as error:
            self._step(live, (Rejected(attempt, error),))
        except Exception as error:
            fault = InternalError(f"attempt {attempt} could not be submitted: {error!r}")
            fault.__cause__ = error
            self._step(live, (Stopped(fault),))

    def _routed(self, live: LiveRequest) -> RoutedRequest:
        """A prompt that has to be scored is computed as a whole: nobody's cache makes its prefill shorter."""
        spec, scores_due = live.session.spec, live.session.scores_due
        token_ids = spec.prompt_ids + pack_token_ids(live.session.generated)
        left_us = spec.deadline_us - self.now_us() if spec.deadline_us else 0
        return RoutedRequest(
            request_id=live.wire_id,
            attempt=live.session.attempt,
            model=spec.model,
            token_ids=token_ids,
            tokens_prompt=spec.tokens_prompt,
            hash_root=live.chain.root,
            block_hashes=[] if scores_due else live.chain.over(token_ids),
            sampling=spec.sampling if scores_due else replace(spec.sampling, prompt_logprobs=None),
            gateway=self.address,
            tenant=spec.tenant,
            priority=spec.priority,
            deadline_ms=max(left_us // 1000, 1) if spec.deadline_us else 0,
        )

    def _plan_again(self, live: LiveRequest, decision: Replan) -> None:
        """Never inside of the Conductor's own call: it may be in the middle of a step."""
        log.warning("request %s: attempt %d after %s", live.wire_id, decision.attempt, decision.reason)
        self._metrics.replanned(live.session.spec.model)
        loop = asyncio.get_running_loop()
        live.replan = loop.call_later(decision.delay_us / 1e6, self._submit, live)

    def _finish(self, live: LiveRequest, end: End) -> None:
        live.disarm()
        if live.ticket is not None:
            self._end_ticket(live.ticket)
        del self._live[live.wire_id]
        del self._wire_ids[live.request_id]
        summary = live.session.summary()
        self._metrics.request_ended(live.session.spec, summary, end)
        if isinstance(end.error, InternalError):
            log.error("request %s failed: %s", live.wire_id, end.error, exc_info=end.error.__cause__)
        self._conductor.finish(live.wire_id, end.reason)
        live.wake.set()

    def _arm(self, live: LiveRequest) -> None:
        """One timer per request, moved only when the session asks for an earlier time."""
        at_us = live.session.next_wakeup()
        if at_us is None or (live.timer is not None and live.timer_at_us <= at_us):
            return
        if live.timer is not None:
            live.timer.cancel()
        delay_us = max(at_us - self.now_us(), 0)
        live.timer_at_us = at_us
        live.timer = asyncio.get_running_loop().call_later(delay_us / 1e6, self._timer, live)

    def _timer(self, live: LiveRequest) -> None:
        live.timer = None
        if live.end is None:
            self._step(live, ())
