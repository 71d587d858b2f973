"""The tokens of one request in order of position, whatever order and however often instances deliver them.

Prefill's first token and decode's next ones travel on different connections, so a later position may come first: it
waits here. A replay after a reconnect repeats positions: they are dropped. So each position is handed on exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.plan import TokenLogprobs

Entry = tuple[int, TokenLogprobs | None]


class TokenLog:
    """Positions count over prompt and generated tokens; `position_end` is one past the last that may exist."""

    def __init__(self, tokens_prompt: int, position_end: int) -> None:
        self.generated: list[int] = []
        self.position_next = tokens_prompt
        """Of the token to be handed on next; read only."""
        self._position_end = position_end
        self._waiting: dict[int, Entry] = {}
        self.duplicates = 0

    @property
    def has_gap(self) -> bool:
        """Later tokens are here, the next one is not (once `take` has given None)."""
        return bool(self._waiting)

    def add(self, position: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Positions outside of the request's range are dropped like duplicates."""
        waiting, least, end = self._waiting, self.position_next, self._position_end
        for at, token_id in enumerate(token_ids, position):
            if least <= at < end and at not in waiting:
                waiting[at] = (token_id, None if logprobs is None else logprobs[at - position])
            else:
                self.duplicates += 1

    def take(self) -> Entry | None:
        """The next token in order, None where there is a gap; a token is generated once it has been taken."""
        entry = self._waiting.pop(self.position_next, None)
        if entry is not None:
            self.position_next += 1
            self.generated.append(entry[0])
        return entry

    def drop_waiting(self) -> None:
        """A new attempt samples anew whatever was not handed on."""
        self._waiting.clear()
