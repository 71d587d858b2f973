"""Between protobuf messages and the records of `segue`. Pure translation: nothing is validated here but enum values.

Protobuf floats are 32 bits wide: a temperature of 0.7 arrives as 0.699999988. Every instance sees the same rounded
value, because the gateway's choice crosses this wire before any sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.ids import InstanceRef
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, CancelAttempt, Outcome, OutcomeKind, Peer, TokenDelta
from segue_proto.v1 import inference_pb2, worker_pb2

FINISH_FROM_PB: dict[int, str] = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: "",
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CANCELLED: "cancelled",
    inference_pb2.FINISH_REASON_ERROR: "error",
}
FINISH_TO_PB: dict[str, inference_pb2.FinishReason] = {
    "": inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
    "error": inference_pb2.FINISH_REASON_ERROR,
}

OUTCOME_TO_PB: dict[OutcomeKind, worker_pb2.OutcomeKind] = {
    kind: worker_pb2.OutcomeKind.Value(f"OUTCOME_KIND_{kind.name}") for kind in OutcomeKind
}


class UnknownEnumValue(ValueError):
    """proto3 passes on numbers that an enum does not have."""


def finish_from_pb(number: int) -> str:
    """Raises UnknownEnumValue."""
    reason = FINISH_FROM_PB.get(number)
    if reason is None:
        raise UnknownEnumValue(f"{number} is no reason to finish")
    return reason


OUTCOME_FROM_PB: dict[int, OutcomeKind] = {int(number): kind for kind, number in OUTCOME_TO_PB.items()}

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


def ref_to_pb(ref: InstanceRef) -> worker_pb2.InstanceRef:
    return worker_pb2.InstanceRef(uuid=ref.uuid, incarnation=ref.incarnation)


def ref_from_pb(message: worker_pb2.InstanceRef) -> InstanceRef:
    return InstanceRef(message.uuid, message.incarnation)


def sampling_to_pb(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    """Every field is set, except `logprobs` and `prompt_logprobs` when None."""
    message = inference_pb2.SamplingParams(
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
    )
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_pb(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the record's defaults. `stop` and `skip_special_tokens` are the gateway's own."""
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return SamplingParams(logit_bias=dict(message.logit_bias), stop_token_ids=tuple(message.stop_token_ids), **given)


def logprobs_to_pb(logprobs: Sequence[TokenLogprobs] | None) -> list[inference_pb2.TokenLogprobs]:
    """Texts are left empty: workers know no tokenizer."""
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top=[inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in entry.top],
        )
        for entry in logprobs or ()
    ]


def logprobs_from_pb(messages: Sequence[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs] | None:
    """None when there are none."""
    if not messages:
        return None
    return [TokenLogprobs(entry.logprob, [(top.token_id, top.logprob) for top in entry.top]) for entry in messages]


def scores_to_pb(scores: PromptScores | None) -> worker_pb2.PromptScores | None:
    if scores is None:
        return None
    return worker_pb2.PromptScores(
        position=scores.position,
        alternatives=scores.alternatives,
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
    )


def scores_from_pb(message: worker_pb2.PromptScores) -> PromptScores:
    return PromptScores(
        position=message.position,
        alternatives=message.alternatives,
        logprobs=list(message.logprobs),
        ranks=list(message.ranks),
        top_ids=list(message.top_ids),
        top_logprobs=list(message.top_logprobs),
    )


def peer_to_pb(peer: Peer) -> worker_pb2.Peer:
    return worker_pb2.Peer(ref=ref_to_pb(peer.ref), name=peer.name, control_address=peer.control_address)


def peer_from_pb(message: worker_pb2.Peer) -> Peer:
    return Peer(ref=ref_from_pb(message.ref), name=message.name, control_address=message.control_address)


def assign_to_pb(assign: Assign) -> worker_pb2.Assign:
    return worker_pb2.Assign(
        request_id=assign.request_id,
        attempt=assign.attempt,
        gateway=assign.gateway,
        token_ids=assign.token_ids,
        tokens_prompt=assign.tokens_prompt,
        sampling=sampling_to_pb(assign.sampling),
        prefill=None if assign.prefill is None else peer_to_pb(assign.prefill),
        decode=None if assign.decode is None else peer_to_pb(assign.decode),
        hash_root=assign.hash_root,
        deadline_ms=assign.deadline_ms,
    )


def assign_from_pb(message: worker_pb2.Assign) -> Assign:
    return Assign(
        request_id=message.request_id,
        attempt=message.attempt,
        gateway=message.gateway,
        token_ids=message.token_ids,
        tokens_prompt=message.tokens_prompt,
        sampling=sampling_from_pb(message.sampling),
        prefill=peer_from_pb(message.prefill) if message.HasField("prefill") else None,
        decode=peer_from_pb(message.decode) if message.HasField("decode") else None,
        hash_root=message.hash_root,
        deadline_ms=message.deadline_ms,
    )


def cancel_to_pb(cancel: CancelAttempt) -> worker_pb2.CancelAttempt:
    return worker_pb2.CancelAttempt(request_id=cancel.request_id, attempt=cancel.attempt, reason=cancel.reason)


def cancel_from_pb(message: worker_pb2.CancelAttempt) -> CancelAttempt:
    return CancelAttempt(request_id=message.request_id, attempt=message.attempt, reason=message.reason)


def outcome_to_pb(outcome: Outcome) -> worker_pb2.Outcome:
    return worker_pb2.Outcome(
        request_id=outcome.request_id,
        attempt=outcome.attempt,
        kind=OUTCOME_TO_PB[outcome.kind],
        reason=outcome.reason,
        tokens_cached=outcome.tokens_cached,
        tokens_generated=outcome.tokens_generated,
    )


def outcome_from_pb(message: worker_pb2.Outcome) -> Outcome:
    """Raises KeyError for a kind this version does not know."""
    return Outcome(
        request_id=message.request_id,
        attempt=message.attempt,
        kind=OUTCOME_FROM_PB[message.kind],
        reason=message.reason,
        tokens_cached=message.tokens_cached,
        tokens_generated=message.tokens_generated,
    )


def delta_to_pb(delta: TokenDelta) -> worker_pb2.TokenDelta:
    return worker_pb2.TokenDelta(
        request_id=delta.request_id,
        attempt=delta.attempt,
        position=delta.position,
        token_ids=delta.token_ids,
        logprobs=logprobs_to_pb(delta.logprobs),
        finish=FINISH_TO_PB[delta.finish],
        error=delta.error,
        tokens_cached=delta.tokens_cached,
        from_prefill=delta.from_prefill,
        queue_us=min(delta.queue_us, 0xFFFFFFFF),
        compute_us=min(delta.compute_us, 0xFFFFFFFF),
        scores=scores_to_pb(delta.scores),
    )


def delta_from_pb(message: worker_pb2.TokenDelta) -> TokenDelta:
    return TokenDelta(
        request_id=message.request_id,
        attempt=message.attempt,
        position=message.position,
        token_ids=list(message.token_ids),
        logprobs=logprobs_from_pb(message.logprobs),
        finish=finish_from_pb(message.finish),
        error=message.error,
        tokens_cached=message.tokens_cached,
        from_prefill=message.from_prefill,
        queue_us=message.queue_us,
        compute_us=message.compute_us,
        scores=scores_from_pb(message.scores) if message.HasField("scores") else None,
    )
