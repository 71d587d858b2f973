"""Stop strings over a stream of text.

The match that counts is the one that *ends* first (of two that end together, the longer one): a rule that does not
depend on how the text was cut into pieces. Text that might be the beginning of a stop string is held back, at most one
character less than the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._held_max = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown. After a match nothing more ever is; `matched` is the stop string."""
        if not self._stops or self.matched is not None or not text:
            return text if self.matched is None else ""
        text = self._held + text
        cut = self._first_match(text)
        if cut is None:
            self._held = self._possible_start(text)
            return text[: len(text) - len(self._held)]
        self._held = ""
        return text[:cut]

    def flush(self) -> str:
        """The stream ended without a match: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            candidate = (start + len(stop), start)
            if best is None or candidate < best:
                best, self.matched = candidate, stop
        return None if best is None else best[1]

    def _possible_start(self, text: str) -> str:
        for length in range(min(self._held_max, len(text)), 0, -1):
            suffix = text[-length:]
            if suffix in self._prefixes:
                return suffix
        return ""
