"""When to ask an instance to repeat KV events that were missed: at once, then at growing intervals until it did."""

from __future__ import annotations

RETRY_US = 1_000_000
RETRY_US_MAX = 30_000_000


class ResyncSchedule:
    """uuid -> when to ask next. An answer travels through the lossy event socket, so it may need asking again."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self._interval: dict[str, int] = {}

    def want(self, uuid: str, now_us: int) -> None:
        """A gap was seen. No change while an answer is awaited."""
        if uuid not in self._due:
            self._due[uuid] = now_us
            self._interval[uuid] = RETRY_US

    def settle(self, uuid: str) -> None:
        """Nothing is missing (any more)."""
        self._due.pop(uuid, None)
        self._interval.pop(uuid, None)

    def take_due(self, now_us: int) -> list[str]:
        """Whom to ask now."""
        due = [uuid for uuid, at_us in self._due.items() if at_us <= now_us]
        for uuid in due:
            self._due[uuid] = now_us + self._interval[uuid]
            self._interval[uuid] = min(2 * self._interval[uuid], RETRY_US_MAX)
        return due

    def next_due(self) -> int | None:
        return min(self._due.values(), default=None)
