"""Instances push tokens over a real TokenLink stream."""

from collections.abc import Awaitable, Callable

import grpc
import pytest
from gateway_front import Front, tokens_of
from segue_proto.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

from conductor.gateway.testing import Script
from segue.wire_version import METADATA_KEY, WIRE_VERSION

Start = Callable[..., Awaitable[Front]]
REF = worker_pb2.InstanceRef(uuid="uuid-d0", incarnation=1)


def batch(*deltas: worker_pb2.TokenDelta) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(ref=REF, name="d0", deltas=deltas)


def push_of(channel: grpc.aio.Channel, version: str | None = str(WIRE_VERSION)) -> grpc.aio.StreamStreamCall:
    metadata = () if version is None else ((METADATA_KEY, version),)
    return worker_pb2_grpc.TokenLinkStub(channel).Push(metadata=metadata)


def wire_id(front: Front) -> str:
    return front.conductor.submitted[0].request_id


async def rest_of(call: grpc.aio.UnaryStreamCall) -> list[inference_pb2.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def delta(
    request_id: str, position: int, ids: list[int], *, attempt: int = 1, **fields: object
) -> worker_pb2.TokenDelta:
    return worker_pb2.TokenDelta(request_id=request_id, attempt=attempt, position=position, token_ids=ids, **fields)


async def test_pushed_tokens_reach_the_client_once_and_batches_are_acknowledged(start: Start) -> None:
    front = await start(lambda request: Script(hang=True))
    ids = tokens_of("hello world")
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1, 2, 3]), request_id="r")
        )
        await call.read()
        push = push_of(channel)
        await push.write(batch(delta(wire_id(front), 3, ids[:1])))
        await push.write(batch(delta(wire_id(front), 3, ids[:1])))
        await push.write(batch(delta(wire_id(front), 4, ids[1:], finish=inference_pb2.FINISH_REASON_LENGTH)))
        await push.done_writing()
        acks = [ack async for ack in push]
        responses = await rest_of(call)
    assert acks[-1].batches == 3
    assert [token_id for response in responses for token_id in response.delta.token_ids] == ids
    assert "".join(response.delta.text for response in responses) == "hello world"
    assert responses[-1].finished.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_work_for_an_unknown_request_is_answered_with_a_cancel(start: Start) -> None:
    front = await start()
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        push = push_of(channel)
        await push.write(batch(delta("gone", 3, [1])))
        ack = await push.read()
        await push.done_writing()
    assert [cancel.request_id for cancel in ack.cancels] == ["gone"]


async def test_a_last_message_for_an_unknown_request_needs_no_cancel(start: Start) -> None:
    front = await start()
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        push = push_of(channel)
        await push.write(batch(delta("gone", 3, [1], finish=inference_pb2.FINISH_REASON_STOP)))
        await push.done_writing()
        acks = [ack async for ack in push]
    assert acks[-1].batches == 1 and not any(ack.cancels for ack in acks)


async def test_work_for_a_replaced_attempt_is_cancelled_and_its_tokens_are_not_used(start: Start) -> None:
    front = await start(lambda request: Script(hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1, 2, 3]), request_id="r")
        )
        await call.read()
        front.gateway.table.on_attempt_failed(wire_id(front), 1, "instance d0 is lost")
        push = push_of(channel)
        await push.write(batch(delta(wire_id(front), 3, [9])))
        ack = await push.read()
        while len(front.conductor.submitted) < 2:
            await push.write(batch())
            await push.read()
        await push.write(
            batch(delta(wire_id(front), 3, tokens_of("ok"), attempt=2, finish=inference_pb2.FINISH_REASON_LENGTH))
        )
        await push.done_writing()
        responses = await rest_of(call)
    assert [(cancel.request_id, cancel.attempt) for cancel in ack.cancels] == [(wire_id(front), 1)]
    assert "".join(response.delta.text for response in responses) == "ok"


async def test_a_late_token_of_an_earlier_request_with_the_same_id_is_not_taken_for_a_new_one(start: Start) -> None:
    front = await start(lambda request: Script(hang=True))
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1, 2, 3]), request_id="r")
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        first = stub.Generate(request)
        await first.read()
        await stub.Cancel(inference_pb2.CancelRequest(request_id="r"))
        await front.idle()
        second = stub.Generate(request)
        await second.read()
        push = push_of(channel)
        await push.write(batch(delta(wire_id(front), 3, tokens_of("old"))))
        ack = await push.read()
        newest = front.conductor.submitted[1].request_id
        await push.write(batch(delta(newest, 3, tokens_of("new"), finish=inference_pb2.FINISH_REASON_LENGTH)))
        responses = await rest_of(second)
    assert [cancel.request_id for cancel in ack.cancels] == [wire_id(front)]
    assert "".join(response.delta.text for response in responses) == "new"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff\xff", "TokenBatch: Error parsing message"),
        (batch(worker_pb2.TokenDelta(finish=77)).SerializeToString(), "TokenBatch: 77 is no reason to finish"),
    ],
)
async def test_what_cannot_be_read_ends_its_stream_with_the_reason(start: Start, raw: bytes, reason: str) -> None:
    front = await start()
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        push = channel.stream_stream("/segue.v1.TokenLink/Push")(metadata=((METADATA_KEY, str(WIRE_VERSION)),))
        await push.write(raw)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(reason)


@pytest.mark.parametrize(
    ("named", "read"), [(None, 0), (str(WIRE_VERSION + 1), WIRE_VERSION + 1), ("newest", 0), ("9" * 5000, 0), ("-1", 0)]
)
async def test_stream_of_another_wire_version_is_refused_with_the_reason(
    start: Start, named: str | None, read: int
) -> None:
    front = await start()
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        push = push_of(channel, named)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == (
        f"wire version differs: the Conductor has {WIRE_VERSION}, the instance has {read}"
    )
