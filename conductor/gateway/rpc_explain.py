"""Why a request went where it went, as protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from segue_proto.v1 import inference_pb2

from conductor.core.decision_log import Considered, Explanation
from conductor.core.latency import Terms

RECENT_DECISIONS = 20
"""Told when none is named and no number is given."""


def explanations_to_pb(attempts: Sequence[Explanation]) -> inference_pb2.ExplainResponse:
    return inference_pb2.ExplainResponse(attempts=[_attempt_to_pb(attempt) for attempt in attempts])


def recent_to_pb(decisions: Sequence[tuple[int, Explanation]]) -> inference_pb2.ExplainResponse:
    """With their ages in microseconds, and of the choices the chosen one."""
    response = inference_pb2.ExplainResponse()
    for age_us, attempt in decisions:
        chosen = () if attempt.chosen is None else (attempt.chosen,)
        told = _attempt_to_pb(msgspec.structs.replace(attempt, candidates=chosen))
        told.age_us = max(age_us, 0)
        response.attempts.append(told)
    return response


def _attempt_to_pb(attempt: Explanation) -> inference_pb2.ExplainedAttempt:
    return inference_pb2.ExplainedAttempt(
        request_id=attempt.key.request_id,
        attempt=attempt.key.attempt,
        model=attempt.model,
        tenant=attempt.tenant,
        priority=attempt.priority,
        tokens_known=attempt.tokens_known,
        waited_us=attempt.waited_us,
        decision=attempt.decision,
        reason=attempt.reason,
        choices=[_choice_to_pb(choice) for choice in attempt.candidates],
        choices_total=attempt.candidates_total,
        ttft_us=attempt.actual.ttft_us,
        tpot_us=attempt.actual.tpot_us,
        tokens_generated=attempt.actual.tokens_generated,
        prefill_let_go=attempt.prefill_let_go,
        ended=attempt.ended,
    )


def _choice_to_pb(choice: Considered) -> inference_pb2.ConsideredChoice:
    return inference_pb2.ConsideredChoice(
        prefill=choice.prefill,
        decode=choice.decode,
        source=choice.source,
        cost=choice.cost,
        tokens_compute=choice.tokens_compute,
        tokens_cached=choice.tokens_cached,
        terms=None if choice.terms is None else _terms_to_pb(choice.terms),
        verdict=choice.verdict,
    )


def _terms_to_pb(terms: Terms) -> inference_pb2.PredictedTerms:
    return inference_pb2.PredictedTerms(
        queue_us=terms.queue_us,
        prefill_us=terms.prefill_us,
        ttft_us=terms.ttft_us,
        ttft_q90_us=terms.ttft_q90_us,
        batch=terms.batch,
        kv_tokens=terms.kv_tokens,
        tpot_us=terms.tpot_us,
        tpot_q90_us=terms.tpot_q90_us,
    )
