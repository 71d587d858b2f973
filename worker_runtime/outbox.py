"""Decisions of one step in the making, and the two kinds that need the names of an attempt spelled out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from segue.ids import AttemptRef, InstanceRef
from segue.worker_messages import Outcome, OutcomeKind
from worker_runtime.events import Assigned, Decision, Report, SendPeer


class Named(Protocol):
    """What an outbox reads of an attempt."""

    conductor: str
    tokens_generated: int

    @property
    def key(self) -> AttemptRef: ...

    @property
    def peer(self) -> InstanceRef | None: ...


class Outbox:
    """Filled during a step, emptied by `take` at its end."""

    def __init__(self, ref: InstanceRef) -> None:
        self._ref = ref
        self._decisions: list[Decision] = []

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def extend(self, decisions: Iterable[Decision]) -> None:
        self._decisions.extend(decisions)

    def take(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken

    def say(self, attempt: Named, kind: type[Any], *rest: object) -> None:
        """A message about the attempt to its peer; `rest` are the fields after the four names."""
        self.add(SendPeer(kind(attempt.key.request_id, attempt.key.attempt, self._ref, attempt.peer, *rest)))

    def report(self, attempt: Named, kind: OutcomeKind, reason: str = "", tokens_cached: int = 0) -> None:
        """An outcome to the Conductor that assigned the attempt."""
        outcome = Outcome(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            kind=kind,
            reason=reason,
            tokens_cached=tokens_cached,
            tokens_generated=attempt.tokens_generated,
        )
        self.add(Report(attempt.conductor, outcome))

    def turn_down(self, event: Assigned, kind: OutcomeKind, reason: str) -> None:
        """The outcome of an assignment that is not taken at all."""
        assign = event.assign
        outcome = Outcome(request_id=assign.request_id, attempt=assign.attempt, kind=kind, reason=reason)
        self.add(Report(event.conductor, outcome))
