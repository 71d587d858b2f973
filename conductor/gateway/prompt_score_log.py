"""Log-probabilities of one request's prompt, collected until every token but the first has its own.

They come chunk by chunk from whoever computes the prompt. An attempt that is preempted or replaced begins anew: what is
known already is kept, what repeats it is dropped.
"""

from __future__ import annotations

import math

from segue.plan import PromptScores


class PromptScoreLog:
    def __init__(self, tokens_prompt: int, alternatives: int) -> None:
        self._tokens_prompt = tokens_prompt
        self._joined = PromptScores(1, alternatives, [], [], [], [])

    @property
    def position_next(self) -> int:
        return 1 + len(self._joined.logprobs)

    @property
    def is_complete(self) -> bool:
        return self.position_next >= self._tokens_prompt

    def add(self, scores: PromptScores) -> str:
        """Returns what is wrong with them, or ""."""
        joined, skipped = self._joined, self.position_next - scores.position
        if scores.alternatives != joined.alternatives or skipped < 0:
            return f"scores at {scores.position} with {scores.alternatives} alternatives do not follow what is known"
        if any(map(math.isnan, scores.logprobs)):
            return "log-probabilities of the prompt are not numbers"
        joined.logprobs.extend(scores.logprobs[skipped:])
        joined.ranks.extend(scores.ranks[skipped:])
        joined.top_ids.extend(scores.top_ids[skipped * joined.alternatives :])
        joined.top_logprobs.extend(scores.top_logprobs[skipped * joined.alternatives :])
        return ""

    def take(self) -> PromptScores:
        """All of them, once complete; to be read only."""
        return self._joined
