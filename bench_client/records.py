"""What was planned for one request and what was seen of it. Times in integers; `perf_counter` is the clock."""

from __future__ import annotations

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload, before it is sent."""

    index: int
    tokens_input: int
    tokens_output: int
    arrival_us: int | None = None
    """After the start of the run; None: as soon as a slot is free."""
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks: equal ids are equal tokens. Empty: a prompt of its own."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it. Times are microseconds after the start of the run."""

    index: int
    tokens_input_planned: int
    tokens_output_planned: int
    scheduled_us: int | None = None
    sent_us: int = 0
    """Just before the request is written."""
    content_us: tuple[int, ...] = ()
    """Arrival of each chunk that carried text, in order."""
    ended_us: int = 0
    """When the stream had ended, after its last event."""
    tokens_input: int | None = None
    tokens_output: int | None = None
    tokens_cached: int | None = None
    """As the server's usage object says; None: it did not."""
    finish_reason: str = ""
    error: str = ""
    """Empty, or the class of what went wrong: `http 429 overloaded`, `timeout`, `disconnected`, ..."""
    detail: str = ""
    """The server's message, or the exception's."""

    @property
    def ok(self) -> bool:
        return not self.error
