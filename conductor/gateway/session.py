"""The life of one request as its gateway sees it: a pure state machine that owns the token log and the terminal state.

    WAITING --Submitted--> PLANNED --Placed--> PLACED --tokens--> STREAMING --> ENDED
       ^                      |                  |                    |
       +----------------------+--- AttemptFailed +--------------------+

Rules that hold whatever instances send:

- Every attempt has a number. Messages of another attempt are stale and counted, never used: a token that an earlier
  plan sampled late need not be the one that the present plan continues from.
- Each token position is emitted at most once, in order (`TokenLog`), and nothing after the end is emitted or counted.
- There is exactly one End. The instance's finish is a report; a stop string, the length, a cancel or the deadline end
  the request here first.
- A failed attempt is planned again with prompt and tokens so far, at most limits.ATTEMPTS_MAX plans in a row that bring
  no progress, the later ones with growing delays. A rejection ends the request only at its first plan; afterwards it
  counts as a failed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from conductor.gateway.prompt_score_log import PromptScoreLog
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
    Summary,
)
from conductor.gateway.text_stream import TextStream
from conductor.gateway.token_log import TokenLog
from conductor.ports import ReceivedTokens
from segue import limits
from segue.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded, Unavailable
from segue.plan import TokenLogprobs

REPLAN_DELAYS_US = (0, 0, 100_000, 400_000, 1_600_000)
"""After 0, 1, ... failures in a row: the first re-plan is at once, later ones give a restarting instance time."""

GAP_US_MAX = 3_000_000
"""A missing position that an instance's reconnect did not replay by then (its lease's scale) fails the attempt."""


class State(Enum):
    WAITING = "to be submitted"
    PLANNED = "submitted, not placed"
    PLACED = "instances chosen"
    STREAMING = "tokens arrive"
    ENDED = "terminal"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PLANNED, State.WAITING, State.ENDED}),
    State.PLANNED: frozenset({State.PLACED, State.STREAMING, State.WAITING, State.ENDED}),
    State.PLACED: frozenset({State.STREAMING, State.WAITING, State.ENDED}),
    State.STREAMING: frozenset({State.STREAMING, State.WAITING, State.ENDED}),
    State.ENDED: frozenset(),
}


class Session:
    """`text` is this request's own detokeniser and stop matcher."""

    def __init__(self, spec: SessionSpec, text: TextStream) -> None:
        self.spec = spec
        self.state = State.WAITING
        self.attempt = 1
        self.end: End | None = None
        self.stale = 0
        self._failures = 0
        """Attempts in a row that ended without progress, or right after it."""
        self._tokens_before = 0
        """Tokens when the present attempt was planned."""
        self._text = text
        self._log = TokenLog(spec.tokens_prompt, spec.tokens_prompt + spec.sampling.max_tokens)
        alternatives = spec.sampling.prompt_logprobs
        self._scores = None if alternatives is None else PromptScoreLog(spec.tokens_prompt, alternatives)
        self._scores_told = self._scores is None
        self._finish: tuple[int, ReceivedTokens] | None = None
        self._gap_since_us: int | None = None
        self._times = dict.fromkeys(("routed", "prefill_started", "first_token", "handoff_complete", "finished"), 0)
        self._tokens_cached = 0
        self._queue_us = 0
        self._prefill = self._decode = self._decode_placed = ""

    @property
    def generated(self) -> Sequence[int]:
        return self._log.generated

    @property
    def scores_due(self) -> bool:
        """Whether an attempt made now has to score the prompt."""
        return self._scores is not None and not self._scores.is_complete

    def next_wakeup(self) -> int | None:
        """When `step` must be called even without an event."""
        if self.end is not None:
            return None
        deadline_us = self.spec.deadline_us or None
        if self._gap_since_us is None:
            return deadline_us
        gap_us = self._gap_since_us + GAP_US_MAX
        return gap_us if deadline_us is None else min(deadline_us, gap_us)

    def step(self, now_us: int, events: Sequence[Event]) -> list[Decision]:
        decisions: list[Decision] = []
        for event in events:
            if self.end is None:
                decisions += self._apply(now_us, event)
        if self.end is None and (self.spec.deadline_us or self._gap_since_us is not None):
            decisions += self._overdue(now_us)
        return decisions

    def summary(self) -> Summary:
        times = {f"{name}_us": at_us for name, at_us in self._times.items()}
        return Summary(
            tokens_prompt=self.spec.tokens_prompt,
            tokens_generated=0 if self.spec.prompt_only else len(self._log.generated),
            tokens_cached=self._tokens_cached,
            tokenized_us=self.spec.tokenized_us,
            queue_us=self._queue_us,
            prefill_instance=self._prefill,
            decode_instance=self._decode or self._decode_placed,
            attempts=self.attempt,
            **times,
        )

    def check(self) -> None:
        """Raise InternalError when an invariant is broken."""
        if (self.end is None) != (self.state is not State.ENDED):
            raise InternalError(f"session {self.spec.request_id}: terminal state and end disagree")
        if len(self._log.generated) > self.spec.sampling.max_tokens:
            raise InternalError(f"session {self.spec.request_id}: more tokens than max_tokens")
        if self.attempt > limits.ATTEMPTS_TOTAL_MAX or self._failures >= limits.ATTEMPTS_MAX:
            raise InternalError(f"session {self.spec.request_id}: more attempts than allowed")

    def _apply(self, now_us: int, event: Event) -> list[Decision]:
        if isinstance(event, Stopped):
            return self._stopped(now_us, event)
        if event.attempt != self.attempt:
            self.stale += 1
            return []
        match event:
            case ReceivedTokens():
                return self._tokens(now_us, event)
            case Submitted():
                self._move(State.PLANNED)
            case Placed():
                self._placed(now_us, event)
            case HandoffComplete():
                self._stamp("handoff_complete", now_us)
            case AttemptFailed():
                return self._failed(now_us, event.reason)
            case Rejected():
                return self._rejected(now_us, event)
        return []

    def _placed(self, now_us: int, event: Placed) -> None:
        self._stamp("routed", now_us)
        self._decode_placed = event.placement.decode
        if self.state is State.PLANNED:
            self._move(State.PLACED)

    def _tokens(self, now_us: int, received: ReceivedTokens) -> list[Decision]:
        if self.state is not State.STREAMING:
            if self.state is State.WAITING:
                self.stale += 1
                return []
            if received.token_ids:
                self._move(State.STREAMING)
        if received.token_ids:
            self._note_source(now_us, received)
        scores, fault = ([], "") if self._scores_told else self._take_scores(received)
        if fault or (self.spec.prompt_only and received.token_ids):
            return scores + (self._fail(now_us, fault) if fault else self._end(now_us, End("length")))
        wanted = self.spec.sampling.logprobs is not None
        if wanted and len(received.logprobs or ()) != len(received.token_ids):
            return self._fail(now_us, f"{received.instance} sent tokens without their log-probabilities")
        self._log.add(received.position, received.token_ids, received.logprobs if wanted else None)
        if received.finish:
            self._finish = (received.position + len(received.token_ids), received)
        return scores + self._advance(now_us)

    def _take_scores(self, received: ReceivedTokens) -> tuple[list[Decision], str]:
        """(what to tell of the prompt, what is wrong). Scores come before the first token, from the same instance."""
        if self._scores is None:
            return [], ""
        if received.scores is not None and (fault := self._scores.add(received.scores)):
            return [], f"{received.instance}: {fault}"
        if self._scores.is_complete:
            self._scores_told = True
            wants_logprobs = self.spec.sampling.logprobs is not None
            return [Emit([], "", [] if wants_logprobs else None, self._scores.take())], ""
        if received.token_ids and received.position == self._log.position_next:
            return [], f"{received.instance} sent the first token before the prompt's log-probabilities"
        return [], ""

    def _advance(self, now_us: int) -> list[Decision]:
        """Hand on every token that is ready; end where the request ends."""
        log, stream, tokens_max = self._log, self._text, self.spec.sampling.max_tokens
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        text = reason = ""
        while not reason and (entry := log.take()) is not None:
            token_id, logprob = entry
            tokens.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
            reported = self._finish is not None and self._reported_end()
            if reported != "stop":
                text += stream.feed(token_id)
            if stream.stopped or reported == "stop":
                reason = "stop"
            elif len(log.generated) >= tokens_max:
                reason = "length"
        self._gap_since_us = None if reason or not log.has_gap else (self._gap_since_us or now_us)
        return self._conclude(now_us, tokens, text, logprobs, reason or self._reported_end())

    def _reported_end(self) -> str:
        """The finish that the instance reported for exactly the tokens handed on so far, if any."""
        if self._finish is None or self._finish[0] > self._log.position_next:
            return ""
        return self._finish[1].finish

    def _conclude(
        self, now_us: int, tokens: list[int], text: str, logprobs: list[TokenLogprobs], reason: str
    ) -> list[Decision]:
        if reason in ("stop", "length") and not self._text.stopped:
            text += self._text.flush()
            reason = "stop" if self._text.stopped else reason
        decisions: list[Decision] = []
        if tokens or text:
            decisions.append(Emit(tokens, text, logprobs if self.spec.sampling.logprobs is not None else None))
        if not reason:
            return decisions
        if reason in ("stop", "length"):
            decisions += self._end(now_us, End(reason))
        elif self._finish is not None:
            report = self._finish[1]
            failure = f"{report.instance} reported {reason}: {report.error or 'no reason given'}"
            decisions += self._fail(now_us, failure) if reason == "error" else self._failed(now_us, failure)
        return decisions

    def _note_source(self, now_us: int, received: ReceivedTokens) -> None:
        if received.from_prefill:
            self._prefill = received.instance
        else:
            self._decode = received.instance
        if received.position == self.spec.tokens_prompt and not self._times["first_token"]:
            self._stamp("first_token", now_us)
            self._tokens_cached = min(received.tokens_cached, self.spec.tokens_prompt)
            self._queue_us = received.queue_us
            since_arrival_us = self._times["first_token"] - received.compute_us
            self._times["prefill_started"] = max(since_arrival_us, self._times["routed"], 0)

    def _failed(self, now_us: int, reason: str, *, delay_us_min: int = 0) -> list[Decision]:
        progress = len(self.generated) - self._tokens_before >= limits.PROGRESS_TOKENS
        failures = 1 if progress else self._failures + 1
        if failures >= limits.ATTEMPTS_MAX or self.attempt >= limits.ATTEMPTS_TOTAL_MAX:
            message = f"{self.attempt} attempts failed, the last one because: {reason}"
            return self._end(now_us, End("error", Unavailable(message)))
        self._failures, self._tokens_before = failures, len(self.generated)
        self._log.drop_waiting()
        self._finish = self._gap_since_us = None
        self._move(State.WAITING)
        self.attempt += 1
        return [Replan(self.attempt, max(REPLAN_DELAYS_US[failures], delay_us_min), reason)]

    def _rejected(self, now_us: int, event: Rejected) -> list[Decision]:
        if self.attempt == 1 or not isinstance(event.error, Overloaded | Unavailable):
            return self._end(now_us, End("error", event.error))
        retry_ms = event.error.retry_after_ms if isinstance(event.error, Overloaded) else 0
        return self._failed(now_us, event.error.message, delay_us_min=retry_ms * 1000)

    def _stopped(self, now_us: int, event: Stopped) -> list[Decision]:
        reason = "cancelled" if isinstance(event.error, Cancelled) else "error"
        return self._end(now_us, End(reason, event.error))

    def _overdue(self, now_us: int) -> list[Decision]:
        if self.spec.deadline_us and now_us >= self.spec.deadline_us:
            waited_ms = (self.spec.deadline_us - self.spec.arrived_us) // 1000
            return self._end(now_us, End("error", DeadlineExceeded(f"the request's deadline of {waited_ms} ms passed")))
        if self._gap_since_us is not None and now_us >= self._gap_since_us + GAP_US_MAX:
            return self._failed(now_us, f"the token at position {self._log.position_next} never arrived")
        return []

    def _fail(self, now_us: int, message: str) -> list[Decision]:
        return self._end(now_us, End("error", InternalError(message)))

    def _end(self, now_us: int, end: End) -> list[Decision]:
        self._move(State.ENDED)
        self.end = end
        self._stamp("finished", now_us)
        return [end]

    def _stamp(self, name: str, now_us: int) -> None:
        if not self._times[name]:
            self._times[name] = max(now_us - self.spec.arrived_us, 1)

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"session {self.spec.request_id}: {self.state.name} may not become {state.name}")
        self.state = state
