"""Text of one running request: detokeniser and stop strings together, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.gateway.detokenizer import Detokenizer
from conductor.gateway.stop_strings import StopMatcher


class TextStream:
    """`tokens_free` tokens pass before stop strings count (`min_tokens`)."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, tokens_free: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._tokens_free = tokens_free

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def feed(self, token_id: int) -> str:
        text = self._detokenizer.feed(token_id)
        if self._tokens_free:
            self._tokens_free -= 1
            return text
        return self._matcher.feed(text)

    def flush(self) -> str:
        """End of the tokens. The text that becomes certain here may still hold a stop string."""
        text = self._matcher.feed(self._detokenizer.flush())
        return text if self.stopped else text + self._matcher.flush()
