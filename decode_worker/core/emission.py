"""Tokens of one step on their way to the gateways: one message for each gateway and step."""

from __future__ import annotations

from decode_worker.core.attempt import DecodeAttempt
from segue.batch_planner import SeqUpdate
from segue.limits import TOKENS_PER_PUSH_MAX
from segue.worker_messages import TokenDelta
from worker_runtime.events import PushTokens


class Emission:
    """Collects deltas by gateway until `take`."""

    def __init__(self) -> None:
        self._by_gateway: dict[str, list[TokenDelta]] = {}

    def add(self, attempt: DecodeAttempt, update: SeqUpdate) -> None:
        """Queue the tokens of one update, the first of which stands at `attempt.position`."""
        delta = TokenDelta(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            position=attempt.position,
            token_ids=update.tokens,
            logprobs=update.logprobs,
            finish=update.finish,
            error=update.error,
            tokens_cached=update.tokens_cached,
            scores=update.scores,
        )
        self._by_gateway.setdefault(attempt.assign.gateway, []).append(delta)

    def take(self) -> list[PushTokens]:
        collected, self._by_gateway = self._by_gateway, {}
        return [
            PushTokens(gateway, deltas[start : start + TOKENS_PER_PUSH_MAX])
            for gateway, deltas in collected.items()
            for start in range(0, len(deltas), TOKENS_PER_PUSH_MAX)
        ]
