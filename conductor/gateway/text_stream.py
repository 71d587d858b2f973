"""Text of one running request: detokeniser and stop strings together, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.gateway.detokenizer import Detokenizer
from conductor.gateway.stop_strings import StopMatcher


class TextStream:
    """`tokens_free` tokens pass before stop strings count (`min_tokens`)."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, tokens_free: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._tokens_free = tokens_free
        self.stopped = False

    def feed(self, token_id: int) -> str:
        text = self._detokenizer.feed(token_id)
        if self._matcher is None:
            return text
        if self._tokens_free:
            self._tokens_free -= 1
            return text
        return self._match(self._matcher, text)

    def flush(self) -> str:
        """End of the tokens. The text that becomes certain here may still hold a stop string."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        text = self._match(self._matcher, text)
        return text if self.stopped else text + self._matcher.flush()

    def _match(self, matcher: StopMatcher, text: str) -> str:
        shown = matcher.feed(text)
        self.stopped = matcher.matched is not None
        return shown
