"""Records survive the wire: record -> protobuf bytes -> record."""

from __future__ import annotations

import pytest
from segue_proto import convert
from segue_proto.v1 import inference_pb2, worker_pb2

from segue.ids import InstanceRef
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, CancelAttempt, Outcome, OutcomeKind, Peer, TokenDelta

PEER = Peer(ref=InstanceRef("u", 1 << 50), name="p0", control_address="ipc:///x")


def test_assign_survives_the_wire() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        seed=(1 << 64) - 1,
        logit_bias={7: -2.0},
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
    )
    assign = Assign(
        request_id="r", attempt=3, gateway="g:1", token_ids=b"\0" * 8, tokens_prompt=1, sampling=sampling, prefill=PEER
    )
    raw = convert.assign_to_pb(assign).SerializeToString()
    assert convert.assign_from_pb(worker_pb2.Assign.FromString(raw)) == assign


def test_unset_sampling_fields_take_the_records_defaults() -> None:
    assert convert.sampling_from_pb(inference_pb2.SamplingParams()) == SamplingParams()


def test_zero_is_not_unset() -> None:
    given = SamplingParams(temperature=0.0, max_tokens=0, top_p=0.0)
    raw = convert.sampling_to_pb(given).SerializeToString()
    assert convert.sampling_from_pb(inference_pb2.SamplingParams.FromString(raw)) == given


@pytest.mark.parametrize("finish", ["", "stop", "length", "cancelled", "error"])
def test_delta_survives_the_wire(finish: str) -> None:
    delta = TokenDelta(
        request_id="r",
        attempt=1,
        position=9,
        token_ids=[4, 5],
        logprobs=[TokenLogprobs(-0.5, [(4, -0.5), (6, -1.5)]), TokenLogprobs(-1.0)],
        finish=finish,
        tokens_cached=3,
        from_prefill=True,
        queue_us=5,
        compute_us=6,
        scores=PromptScores(1, 2, [-0.5, -1.0], [1, 4], [9, 8, 7, 6], [-0.5, -1.5, -0.25, -2.0]),
    )
    raw = convert.delta_to_pb(delta).SerializeToString()
    assert convert.delta_from_pb(worker_pb2.TokenDelta.FromString(raw)) == delta


@pytest.mark.parametrize("kind", list(OutcomeKind))
def test_every_outcome_kind_survives_the_wire(kind: OutcomeKind) -> None:
    outcome = Outcome(request_id="r", attempt=1, kind=kind, reason="why", tokens_cached=1, tokens_generated=2)
    assert convert.outcome_from_pb(convert.outcome_to_pb(outcome)) == outcome


def test_every_wire_kind_but_unspecified_has_a_record() -> None:
    assert set(convert.OUTCOME_FROM_PB) == set(worker_pb2.OutcomeKind.values()) - {0}


def test_cancel_survives_the_wire() -> None:
    cancel = CancelAttempt(request_id="r", attempt=0, reason="client gone")
    assert convert.cancel_from_pb(convert.cancel_to_pb(cancel)) == cancel
