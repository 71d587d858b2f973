"""Every maximum of segue/limits.py is reached: at it the request is served, one above it the documented answer comes.

A new constant without a case here, or a pointer to the test that reaches it, fails `test_every_limit_has_a_case`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from gateway_front import Front
from prometheus_client import CollectorRegistry
from segue_proto.v1 import inference_pb2

from conductor.gateway.hash_chain import HashChain
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.request_fields import ModelLimits, SamplingFields
from conductor.gateway.request_table import RequestTable
from conductor.gateway.session_events import SessionSpec
from conductor.gateway.testing import toy_card
from conductor.gateway.text import TextCodec
from conductor.gateway.validate import check_request_id, check_tenant, validate
from decode_worker.core.attempt import DecodeAttempt
from decode_worker.core.emission import Emission
from kvstore.events import EventLog
from segue import limits
from segue.batch_planner import SeqUpdate
from segue.errors import InvalidField, Overloaded
from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign

Start = Callable[..., Awaitable[Front]]
Fields = Callable[[int], dict[str, Any]]
TESTS = Path(__file__).parents[2]
NAMES = sorted(name for name, value in vars(limits).items() if isinstance(value, int) and name not in ("KIB", "MIB"))

IN_COMPLETIONS: dict[str, tuple[Fields, str]] = {
    "PROMPTS_PER_CALL_MAX": (lambda n: {"prompt": ["a"] * n}, "prompt"),
    "N_MAX": (lambda n: {"n": n}, "n"),
    "SEQUENCES_PER_CALL_MAX": (lambda n: {"prompt": ["a"] * -(-n // 16), "n": 16}, "n"),
    "STOP_STRINGS_MAX": (lambda n: {"stop": ["x"] * n}, "stop"),
    "STOP_STRING_BYTES_MAX": (lambda n: {"stop": "x" * n}, "stop[0]"),
    "STOP_TOKEN_IDS_MAX": (lambda n: {"stop_token_ids": [1] * n}, "stop_token_ids"),
    "LOGPROBS_MAX": (lambda n: {"prompt_logprobs": n}, "prompt_logprobs"),
    "PRIORITY_ABS_MAX": (lambda n: {"priority": n}, "priority"),
}
"""name -> (fields of that size, what the answer names)."""

IN_VALIDATION: dict[str, tuple[Callable[[int], object], str]] = {
    "PROMPT_TOKENS_MAX": (lambda n: checked(n), "prompt"),
    "LOGIT_BIAS_MAX": (lambda n: checked(1, logit_bias=dict.fromkeys(range(n), 1.0)), "logit_bias"),
    "PROMPT_SCORES_MAX": (lambda n: checked(n, prompt_logprobs=0), "prompt_logprobs"),
    "REQUEST_ID_BYTES_MAX": (lambda n: check_request_id("x" * n), "request_id"),
    "TENANT_BYTES_MAX": (lambda n: check_tenant("x" * n), "tenant"),
}
"""Of sizes for which no toy model is large enough, and of names."""

HERE = {
    "BODY_BYTES_MAX": "test_a_body_of_the_maximum_is_read_and_a_larger_one_is_413",
    "GRPC_MESSAGE_BYTES_MAX": "test_a_message_past_the_transports_maximum_is_resource_exhausted",
    "LIVE_REQUESTS_MAX": "test_a_full_table_refuses_with_reason_and_takes_again_when_one_has_ended",
    "KV_EVENTS_PER_BATCH_MAX": "test_a_larger_batch_of_events_is_split",
    "KV_EVENTS_BUFFERED_MAX": "test_events_older_than_what_is_kept_are_answered_by_a_snapshot",
    "TOKENS_PER_PUSH_MAX": "test_more_deltas_than_a_message_may_have_are_split",
}

ELSEWHERE = {
    "ATTEMPTS_MAX": "conductor/gateway/test_gateway_session.py::test_attempts_are_bounded_and_then_the_client_is_told",
    "ATTEMPTS_TOTAL_MAX": "conductor/gateway/test_gateway_session.py::test_attempts_are_bounded_in_all",
    "PROGRESS_TOKENS": "conductor/gateway/test_gateway_session.py::test_attempts_that_bring_too_little_end_the_request",
    "INSTANCES_MAX": "conductor/test_conductor_parts.py::test_members_are_bounded",
    "INSTANCE_NAME_CHARS_MAX": "conductor/test_rpc_workers.py::test_a_manifest_that_cannot_serve_is_refused",
    "QUEUED_REQUESTS_MAX": "conductor/test_queue_limit.py::test_the_queue_takes_its_maximum_and_not_one_more",
    "CONDUCTORS_MAX": "worker_runtime/test_conductors_limit.py::test_no_more_conductors_are_dialled_than_the_maximum",
    "TENANTS_TRACKED_MAX": "kvstore/test_directory_tenants.py"
    "::test_a_ledger_forgets_idle_tenants_and_refuses_to_grow_past_its_maximum",
}


def checked(tokens_prompt: int, **fields: Any) -> object:
    model = ModelLimits(vocab_size=5000, max_model_len=2 * limits.PROMPT_TOKENS_MAX)
    return validate(SamplingFields(**fields), [1] * tokens_prompt, model, seed_drawn=1, max_tokens_default=1)


def test_every_limit_has_a_case() -> None:
    assert sorted([*IN_COMPLETIONS, *IN_VALIDATION, *HERE, *ELSEWHERE]) == NAMES


@pytest.mark.parametrize("name", HERE)
def test_cases_of_this_file_exist(name: str) -> None:
    assert callable(globals()[HERE[name]])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_cases_of_other_files_exist_and_know_the_limit(name: str) -> None:
    path, _, test = ELSEWHERE[name].partition("::")
    text = (TESTS / path).read_text()
    assert f"def {test}(" in text and name in text


@pytest.mark.parametrize("name", IN_COMPLETIONS)
async def test_a_completion_at_the_limit_is_served_and_one_above_it_is_refused_by_name(start: Start, name: str) -> None:
    front = await start()
    (fields, param), limit = IN_COMPLETIONS[name], getattr(limits, name)
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False, timeout=60) as client:
        body = {"model": "toy", "prompt": "a", "max_tokens": 1}
        served = await client.post("/v1/completions", json={**body, **fields(limit)})
        assert served.status_code == 200, served.text
        refused = await client.post("/v1/completions", json={**body, **fields(limit + 1)})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param), error
    assert str(limit) in error["message"]


@pytest.mark.parametrize("name", IN_VALIDATION)
def test_what_is_at_the_limit_passes_and_one_above_it_is_refused_by_name(name: str) -> None:
    (check, field), limit = IN_VALIDATION[name], getattr(limits, name)
    check(limit)
    with pytest.raises(InvalidField) as refused:
        check(limit + 1)
    assert refused.value.field == field


async def test_a_body_of_the_maximum_is_read_and_a_larger_one_is_413(start: Start) -> None:
    front = await start()
    body = b'{"model":"toy","prompt":"a"}'
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False, timeout=60) as client:
        served = await client.post("/v1/completions", content=body.ljust(limits.BODY_BYTES_MAX))
        refused = await client.post("/v1/completions", content=body.ljust(limits.BODY_BYTES_MAX + 1))
    assert served.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


async def grpc_status(front: Front, size: int) -> tuple[grpc.StatusCode, str]:
    """(status, our code) of a Generate message of `size` bytes."""
    empty = inference_pb2.GenerateRequest(text="x" * (size - 100))
    data = inference_pb2.GenerateRequest(text="x" * (2 * size - 100 - empty.ByteSize())).SerializeToString()
    assert len(data) == size
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(front.grpc_address, options=options) as channel:
        call = channel.unary_stream("/segue.v1.Inference/Generate")(data, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    return refused.value.code(), dict(refused.value.trailing_metadata()).get("code", "")


async def test_a_message_past_the_transports_maximum_is_resource_exhausted(start: Start) -> None:
    """Up to the transport's maximum our own handler answers, with the limit of bodies."""
    front = await start()
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await grpc_status(front, limits.GRPC_MESSAGE_BYTES_MAX) == (exhausted, "body_too_large")
    assert await grpc_status(front, limits.GRPC_MESSAGE_BYTES_MAX + 1) == (exhausted, "")


class Silent:
    """A Conductor that never answers."""

    def submit(self, request: object, gateway: object) -> None: ...

    def finish(self, request_id: str, reason: str) -> None: ...


async def test_a_full_table_refuses_with_reason_and_takes_again_when_one_has_ended() -> None:
    table = RequestTable(Silent(), lambda: 1, RequestMetrics(CollectorRegistry()))  # type: ignore[arg-type]
    codec, wake = TextCodec(toy_card()), asyncio.Event()
    sampling = SamplingParams(max_tokens=1)

    def open_one(number: int) -> Any:
        spec = SessionSpec(
            request_id=f"r{number}",
            model="toy",
            prompt_ids=b"\1\0\0\0",
            tokens_prompt=1,
            sampling=sampling,
            arrived_us=0,
        )
        return table.open(spec, codec.stream((), skip_special_tokens=True), HashChain(b"root", 16), wake)

    lives = [open_one(number) for number in range(limits.LIVE_REQUESTS_MAX)]
    with pytest.raises(Overloaded, match=str(limits.LIVE_REQUESTS_MAX)) as refused:
        open_one(-1)
    assert (refused.value.resource, refused.value.retry_after_ms > 0) == ("live_requests", True)
    assert table.cancel(lives[0].request_id)
    open_one(-1)
    assert len(table) == limits.LIVE_REQUESTS_MAX


def event_log() -> EventLog:
    return EventLog(InstanceRef("i", 1))


def test_a_larger_batch_of_events_is_split() -> None:
    most = limits.KV_EVENTS_PER_BATCH_MAX
    assert [len(batch.events) for batch in event_log().batches([BlocksCleared()] * most)] == [most]
    assert [len(batch.events) for batch in event_log().batches([BlocksCleared()] * (most + 1))] == [most, 1]


def test_events_older_than_what_is_kept_are_answered_by_a_snapshot() -> None:
    log = event_log()
    first, *_ = [list(log.batches([BlocksCleared()])) for _ in range(2)]
    rest = limits.KV_EVENTS_BUFFERED_MAX - 2
    for start in range(0, rest, limits.KV_EVENTS_PER_BATCH_MAX):
        list(log.batches([BlocksCleared()] * min(limits.KV_EVENTS_PER_BATCH_MAX, rest - start)))
    kept = log.after(first[0].sequence)
    assert kept is not None and sum(len(batch.events) for batch in kept) == rest + 1  # type: ignore[union-attr]
    list(log.batches([BlocksCleared()] * 2))
    assert log.after(first[0].sequence) is None


def test_more_deltas_than_a_message_may_have_are_split() -> None:
    assign = Assign(
        request_id="r", attempt=1, gateway="g", token_ids=b"\1\0\0\0", tokens_prompt=1, sampling=SamplingParams()
    )
    attempt = DecodeAttempt(assign, "c", 1, 4, 0, 1)
    update = SeqUpdate(1, 1, [5], None, "", "", 0)

    def sizes(count: int) -> list[int]:
        emission = Emission()
        for _ in range(count):
            emission.add(attempt, update)
        return [len(push.deltas) for push in emission.take()]

    assert sizes(limits.TOKENS_PER_PUSH_MAX) == [limits.TOKENS_PER_PUSH_MAX]
    assert sizes(limits.TOKENS_PER_PUSH_MAX + 1) == [limits.TOKENS_PER_PUSH_MAX, 1]
