"""Answers of the Inference service as protobuf messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from segue_proto.convert import FINISH_TO_PB
from segue_proto.v1 import inference_pb2

from conductor.gateway.openai_logprobs import scored_tokens
from conductor.gateway.request_fields import unpack_token_ids
from conductor.gateway.session_events import Emit, End, SessionSpec, Summary
from conductor.ports import ClusterView, InstanceView
from segue.plan import PromptScores, TokenLogprobs

PROMPT_TOKENS_PER_MESSAGE = 1024
"""With 20 alternatives about 1 MB: gRPC clients take 4 MB unless told otherwise."""


def started_to_pb(spec: SessionSpec) -> inference_pb2.GenerateResponse:
    started = inference_pb2.Started(request_id=spec.request_id, model=spec.model, tokens_prompt=spec.tokens_prompt)
    return inference_pb2.GenerateResponse(started=started)


class DeltaEncoder:
    """Plain deltas of one stream as bytes. One message is used for all of them: making and copying three new ones for
    each token costs three times as much as serialising."""

    def __init__(self) -> None:
        self._message = inference_pb2.GenerateResponse(delta=inference_pb2.Delta())
        self._delta = self._message.delta
        self._token_ids = self._delta.token_ids

    def encode(self, emit: Emit) -> bytes:
        """`emit` has no log-probabilities, of tokens or of the prompt."""
        self._token_ids[:] = emit.token_ids
        self._delta.text = emit.text
        data: bytes = self._message.SerializeToString()
        return data


def emit_to_pbs(
    emit: Emit, prompt_ids: bytes, token_text: Callable[[int], str]
) -> Iterator[inference_pb2.GenerateResponse]:
    """What is said of the prompt, in pieces, then the delta. `prompt_ids` is little-endian u32."""
    if emit.scores is not None:
        yield from _scores_to_pbs(emit.scores, unpack_token_ids(prompt_ids), token_text)
    if emit.token_ids or emit.text or emit.scores is None:
        delta = inference_pb2.Delta(token_ids=emit.token_ids, text=emit.text)
        for entry in emit.logprobs or ():
            delta.logprobs.append(_logprobs_to_pb(entry, token_text))
        yield inference_pb2.GenerateResponse(delta=delta)


def _scores_to_pbs(
    scores: PromptScores, prompt_ids: list[int], token_text: Callable[[int], str]
) -> Iterator[inference_pb2.GenerateResponse]:
    entries = scored_tokens(scores, scores.alternatives)
    for start in range(1, len(entries), PROMPT_TOKENS_PER_MESSAGE):
        message = inference_pb2.PromptLogprobs(position=start)
        for position in range(start, min(start + PROMPT_TOKENS_PER_MESSAGE, len(entries))):
            entry, token_id = entries[position], prompt_ids[position]
            assert entry is not None, "only the first token has no entry"
            view = _logprobs_to_pb(entry, token_text)
            token = message.tokens.add(token_id=token_id, logprob=entry.logprob, rank=scores.ranks[position - 1])
            token.text = token_text(token_id)
            token.top.extend(view.top)
        yield inference_pb2.GenerateResponse(prompt_logprobs=message)


def _logprobs_to_pb(entry: TokenLogprobs, token_text: Callable[[int], str]) -> inference_pb2.TokenLogprobs:
    top = [
        inference_pb2.TopLogprob(token_id=token_id, logprob=logprob, text=token_text(token_id))
        for token_id, logprob in entry.top
    ]
    return inference_pb2.TokenLogprobs(logprob=entry.logprob, top=top)


def finished_to_pb(summary: Summary, end: End) -> inference_pb2.GenerateResponse:
    finished = inference_pb2.Finished(
        reason=FINISH_TO_PB[end.reason],
        usage=inference_pb2.Usage(
            tokens_prompt=summary.tokens_prompt,
            tokens_generated=summary.tokens_generated,
            tokens_cached=summary.tokens_cached,
        ),
        timing=inference_pb2.Timing(
            tokenized_us=summary.tokenized_us,
            routed_us=summary.routed_us,
            prefill_started_us=summary.prefill_started_us,
            first_token_us=summary.first_token_us,
            handoff_complete_us=summary.handoff_complete_us,
            finished_us=summary.finished_us,
        ),
        prefill_instance=summary.prefill_instance,
        decode_instance=summary.decode_instance,
        attempts=summary.attempts,
    )
    return inference_pb2.GenerateResponse(finished=finished)


def cluster_to_pb(view: ClusterView, requests_live: int, version: str) -> inference_pb2.GetClusterResponse:
    return inference_pb2.GetClusterResponse(
        instances=[_instance_to_pb(instance) for instance in view.instances],
        models=[
            inference_pb2.Model(
                name=served.card.name,
                architecture=served.card.architecture,
                max_model_len=served.max_model_len,
                vocab_size=served.card.vocab_size,
            )
            for served in view.models
        ],
        requests_queued=view.requests_queued,
        requests_live=requests_live,
        version=version,
    )


def _instance_to_pb(instance: InstanceView) -> inference_pb2.Instance:
    manifest, load = instance.manifest, instance.load
    message = inference_pb2.Instance(
        name=manifest.name,
        uuid=manifest.ref.uuid,
        incarnation=manifest.ref.incarnation,
        role=manifest.role.value,
        model=manifest.model,
        state="draining" if instance.draining else "ready",
        pages_total=manifest.pages_total,
        block_size=manifest.layout.block_size,
        pid=manifest.pid,
        host=manifest.host,
    )
    if load is not None:
        message.running, message.waiting = load.running, load.waiting
        message.tokens_queued, message.preemptions = load.tokens_queued, load.preemptions
        message.pages_free, message.pages_active = load.pages_free, load.pages_active
        message.pages_cached, message.pages_held = load.pages_cached, load.pages_held
        message.pages_quarantined = load.pages_quarantined
    return message
