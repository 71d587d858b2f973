"""Explanations on the wire, predictions as metrics, and a request's priority on its way to the Conductor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import httpx
import msgspec
from gateway_front import Front, saying
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.core.decision_log import Considered, Explanation, RegretTotals
from conductor.core.latency import Actual, Coverage, Terms
from conductor.gateway.prediction_metrics import prediction_metrics
from conductor.gateway.rpc_explain import RECENT_DECISIONS
from conductor.ports import PredictionView
from segue.calibration import Drift
from segue.ids import AttemptRef

Start = Callable[..., Awaitable[Front]]

TERMS = Terms(
    queue_us=1.0,
    prefill_us=2.0,
    ttft_us=3.0,
    ttft_q90_us=4.0,
    batch=5.0,
    kv_tokens=6.0,
    tpot_us=7.0,
    tpot_q90_us=8.0,
)
EXPLAINED = Explanation(
    key=AttemptRef("mine~gw", 2),
    model="toy",
    tenant="gold",
    priority=-3,
    tokens_known=9,
    decided_us=0,
    waited_us=10,
    decision="routed",
    reason="because",
    candidates=(
        Considered(
            prefill="p0",
            decode="d0",
            source="p1",
            cost=0.5,
            tokens_compute=1,
            tokens_cached=2,
            terms=TERMS,
            verdict="chosen",
        ),
        Considered(
            prefill="", decode="d0", source="", cost=0.7, tokens_compute=3, tokens_cached=0, terms=None, verdict=""
        ),
    ),
    candidates_total=12,
    actual=Actual(ttft_us=11, tpot_us=12.0, tokens_generated=13),
    prefill_let_go=True,
    ended="stop",
)


async def explain(front: Front, request_id: str, recent_max: int = 0) -> inference_pb2.ExplainResponse:
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await stub.Explain(inference_pb2.ExplainRequest(request_id=request_id, recent_max=recent_max))


async def test_every_field_of_an_explanation_crosses_the_wire(start: Start) -> None:
    front = await start()
    front.conductor.explained["mine"] = [EXPLAINED]
    (attempt,) = (await explain(front, "mine")).attempts
    assert (attempt.request_id, attempt.attempt, attempt.tenant, attempt.priority) == ("mine~gw", 2, "gold", -3)
    assert (attempt.decision, attempt.reason, attempt.waited_us, attempt.choices_total) == ("routed", "because", 10, 12)
    assert (attempt.ttft_us, attempt.tpot_us, attempt.tokens_generated) == (11, 12.0, 13)
    chosen, other = attempt.choices
    assert (chosen.prefill, chosen.decode, chosen.source, chosen.verdict) == ("p0", "d0", "p1", "chosen")
    assert [getattr(chosen.terms, name) for name in Terms.__struct_fields__] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert not other.HasField("terms")


async def test_an_unknown_request_has_no_attempts(start: Start) -> None:
    front = await start()
    assert not (await explain(front, "nobody")).attempts


async def test_without_an_id_the_latest_decisions_are_told_with_the_chosen_choice_alone(start: Start) -> None:
    front = await start()
    others = [msgspec.structs.replace(EXPLAINED, key=AttemptRef(f"r{number}", 1)) for number in range(30)]
    front.conductor.explained["mine"] = [*others, EXPLAINED]
    newest, older, *_ = (await explain(front, "")).attempts
    assert (newest.request_id, newest.age_us, older.request_id, older.age_us) == ("mine~gw", 0, "r29", 1_000_000)
    assert [(choice.prefill, choice.verdict) for choice in newest.choices] == [("p0", "chosen")]
    assert (newest.prefill_let_go, newest.ended) == (True, "stop")
    assert len((await explain(front, "")).attempts) == RECENT_DECISIONS
    assert len((await explain(front, "", recent_max=3)).attempts) == 3


async def test_a_priority_reaches_the_conductor_from_both_doors(start: Start) -> None:
    front = await start(saying("x"))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.Generate(inference_pb2.GenerateRequest(text="hi", priority=-7)):
            pass
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{front.http_url}/v1/completions", json={"prompt": "hi", "priority": 9})
    assert answer.status_code == 200
    assert [request.priority for request in front.conductor.submitted] == [-7, 9]


def test_coverage_drift_and_regret_become_metrics() -> None:
    view = PredictionView(
        coverage=Coverage(model="toy", kind="ttft", coverage=0.8, drift=Drift.OPTIMISTIC),
        regrets=RegretTotals().with_one(-20e6).with_one(5_000.0),
    )
    coverage, drifted, regret = prediction_metrics([view])
    assert [sample.value for sample in (*coverage.samples, *drifted.samples)] == [0.8, 1.0]
    buckets = {sample.labels["le"]: sample.value for sample in regret.samples if "le" in sample.labels}
    assert (buckets["-10.0"], buckets["0.0"], buckets["0.01"], buckets["+Inf"]) == (1.0, 1.0, 2.0, 2.0)
