"""The tokens of one request in order of position, whatever order and however often instances deliver them.

Prefill's first token and decode's next ones travel on different connections, so a later position may come first: it
waits here. A replay after a reconnect repeats positions: they are dropped. So each position is handed on exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from segue.plan import TokenLogprobs

Entry = tuple[int, TokenLogprobs | None]


class TokenLog:
    """Positions count over prompt and generated tokens; `position_end` is one past the last that may exist."""

    def __init__(self, tokens_prompt: int, position_end: int) -> None:
        self.generated: list[int] = []
        self._tokens_prompt = tokens_prompt
        self._position_end = position_end
        self._waiting: dict[int, Entry] = {}
        self.duplicates = 0

    @property
    def position_next(self) -> int:
        return self._tokens_prompt + len(self.generated)

    @property
    def has_gap(self) -> bool:
        """Later tokens are here, the next one is not (read between, not during, calls of `ready`)."""
        return bool(self._waiting)

    def add(self, position: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Positions outside of the request's range are dropped like duplicates."""
        for offset, token_id in enumerate(token_ids):
            at = position + offset
            if self.position_next <= at < self._position_end and at not in self._waiting:
                self._waiting[at] = (token_id, None if logprobs is None else logprobs[offset])
            else:
                self.duplicates += 1

    def ready(self) -> Iterator[Entry]:
        """Take tokens in order, as far as there is no gap; a token is generated once it has been taken."""
        while (entry := self._waiting.pop(self.position_next, None)) is not None:
            self.generated.append(entry[0])
            yield entry

    def drop_waiting(self) -> None:
        """A new attempt samples anew whatever was not handed on."""
        self._waiting.clear()
