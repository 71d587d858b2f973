import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from gateway_front import Front, client_id, saying, tokens_of
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway.request_fields import unpack_token_ids
from conductor.gateway.testing import Script
from conductor.ports import RoutedRequest
from segue import limits
from segue.errors import Overloaded, Unavailable
from segue.plan import TokenLogprobs

Start = Callable[..., Awaitable[Front]]


async def generate(front: Front, **fields: object) -> list[inference_pb2.GenerateResponse]:
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return [response async for response in stub.Generate(inference_pb2.GenerateRequest(**fields))]


async def failure(front: Front, body: bytes, method: str = "Generate") -> grpc.aio.AioRpcError:
    """The error of a call whose message is given as bytes."""
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.unary_stream(f"/segue.v1.Inference/{method}")(body):
                pass
    return caught.value


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def sampling(**fields: object) -> dict[str, object]:
    return {"text": "hi", "sampling": inference_pb2.SamplingParams(**fields)}


async def test_a_stream_starts_continues_and_finishes_with_usage_and_timing(start: Start) -> None:
    front = await start(saying("hello 漢字 world", tokens_cached=1))
    responses = await generate(front, text="hello", request_id="mine", model="toy")
    started, finished = responses[0].started, responses[-1].finished
    assert (started.request_id, started.model, started.tokens_prompt) == ("mine", "toy", 1)
    assert text_of(responses) == "hello 漢字 world"
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert finished.usage.tokens_generated == len(tokens_of("hello 漢字 world")) + 1
    assert finished.usage.tokens_cached == 1
    assert (finished.prefill_instance, finished.decode_instance, finished.attempts) == ("p0", "d0", 1)
    timing = finished.timing
    assert 0 < timing.tokenized_us <= timing.routed_us <= timing.first_token_us <= timing.finished_us
    assert timing.prefill_started_us and timing.handoff_complete_us


async def test_the_conductor_gets_ids_hashes_and_the_address_of_this_gateway(start: Start) -> None:
    front = await start(saying("x"))
    await generate(front, tokens=inference_pb2.TokenIds(ids=range(40)), tenant="a")
    await generate(front, tokens=inference_pb2.TokenIds(ids=range(40)))
    salted, plain = front.conductor.submitted
    assert salted.token_ids == b"".join(value.to_bytes(4, "little") for value in range(40))
    assert (salted.tokens_prompt, len(salted.block_hashes), salted.gateway) == (40, 2, front.grpc_address)
    assert plain.hash_root == b"r" * 32
    assert not set(salted.block_hashes) & set(plain.block_hashes)


async def test_sampling_fields_reach_the_conductor(start: Start) -> None:
    front = await start(saying("x"))
    await generate(
        front, **sampling(temperature=0, top_k=5, seed=9, max_tokens=7, logit_bias={3: 1.5}, ignore_eos=True)
    )
    given = front.conductor.submitted[0].sampling
    assert (given.temperature, given.top_k, given.seed, given.max_tokens) == (0.0, 5, 9, 7)
    assert given.logit_bias == {3: 1.5} and given.ignore_eos


async def test_an_unseeded_request_gets_a_seed_of_its_own(start: Start) -> None:
    front = await start(saying("x"))
    await generate(front, text="hi")
    await generate(front, text="hi")
    first, second = (request.sampling.seed for request in front.conductor.submitted)
    assert first != second


async def test_a_chat_is_rendered_by_the_models_template(start: Start) -> None:
    front = await start()
    turn = inference_pb2.ChatMessage(role="user", content="hi")
    await generate(front, chat=inference_pb2.Chat(messages=[turn]))
    expected = tokens_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert unpack_token_ids(front.conductor.submitted[0].token_ids) == expected


async def test_log_probabilities_come_with_texts(start: Start) -> None:
    tokens = tokens_of("hello")
    front = await start(lambda request: Script(tokens=tokens, logprobs=[TokenLogprobs(-0.5, [(104, -1.0)])]))
    responses = await generate(front, **sampling(logprobs=1))
    (entry,) = [entry for response in responses for entry in response.delta.logprobs]
    assert (entry.logprob, entry.top[0].token_id, entry.top[0].text) == (-0.5, 104, "h")


async def test_a_lost_instance_leaves_a_gap_in_time_and_none_in_the_text(start: Start) -> None:
    tokens = tokens_of("the first half, the second half")
    front = await start(
        lambda request: Script(tokens=tokens, finish="length", fail_after=5 if request.attempt == 1 else None)
    )
    responses = await generate(front, text="hi")
    assert text_of(responses) == "the first half, the second half"
    assert responses[-1].finished.attempts == 2
    assert len(front.conductor.submitted[1].token_ids) == 4 * (len(tokens_of("hi")) + 5)


async def test_a_client_that_leaves_ends_its_request(start: Start) -> None:
    front = await start(saying("hello", hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi"))
        await call.read()
        call.cancel()
        await front.idle()
    assert [reason for _, reason in front.conductor.finished] == ["cancelled"]


async def test_cancel_ends_a_live_request_and_says_whether_it_found_one(start: Start) -> None:
    front = await start(saying("hello", hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi", request_id="long"))
        await call.read()
        assert (await stub.Cancel(inference_pb2.CancelRequest(request_id="long"))).found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert not (await stub.Cancel(inference_pb2.CancelRequest(request_id="long"))).found


async def test_the_servers_own_deadline_frees_everything(start: Start) -> None:
    front = await start(saying("hello", hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.idle()
    assert 0 < front.conductor.submitted[0].deadline_ms <= 200


async def test_a_live_request_id_cannot_be_used_again_but_later_it_can(start: Start) -> None:
    front = await start(saying("hello", hang=True))
    body = inference_pb2.GenerateRequest(text="hi", request_id="same")
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(body)
        await call.read()
        error = await failure(front, body.SerializeToString())
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()
    await front.idle()
    front.conductor.reply = saying("again")
    first, again = front.conductor.submitted[0], await generate(front, text="hi", request_id="same")
    assert text_of(again) == "again"
    assert first.request_id != front.conductor.submitted[-1].request_id


@pytest.mark.parametrize("late", [False, True])
async def test_overload_says_what_is_short_and_when_to_come_back(start: Start, late: bool) -> None:
    error = Overloaded("queue is full", resource="queue", retry_after_ms=1500)
    front = await start(lambda request: Script(reject=error) if late else Script(refuse=error))
    caught = await failure(front, inference_pb2.GenerateRequest(text="hi").SerializeToString())
    trailing = dict(caught.trailing_metadata())
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (trailing["retry-after-ms"], trailing["resource"], trailing["code"]) == ("1500", "queue", "overloaded")
    assert len(front.gateway.table) == 0


async def test_no_instances_is_unavailable(start: Start) -> None:
    front = await start(lambda request: Script(refuse=Unavailable("no decode instance")))
    caught = await failure(front, inference_pb2.GenerateRequest(text="hi").SerializeToString())
    assert caught.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_fault_of_the_conductor_is_internal_and_ends_the_request(start: Start) -> None:
    def reply(request: RoutedRequest) -> Script:
        raise RuntimeError("a bug")

    front = await start(reply)
    caught = await failure(front, inference_pb2.GenerateRequest(text="hi").SerializeToString())
    assert caught.code() is grpc.StatusCode.INTERNAL and "a bug" not in caught.details()
    assert len(front.gateway.table) == 0


async def test_a_worker_error_is_internal_and_its_text_stays_in_the_log(start: Start) -> None:
    front = await start(lambda request: Script(tokens=[1], finish="error", error="logits are NaN"))
    caught = await failure(front, inference_pb2.GenerateRequest(text="hi").SerializeToString())
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "NaN" not in caught.details()


INVALID = [
    ("bad_utf8", b"\x1a\x02\xff\xfe", "INVALID_ARGUMENT", "UTF-8"),
    ("not_a_message", b"\xff\xff\xff", "INVALID_ARGUMENT", "GenerateRequest"),
    ("no_prompt", {}, "INVALID_ARGUMENT", "prompt: is empty"),
    ("empty_text", {"text": ""}, "INVALID_ARGUMENT", "prompt: is empty"),
    ("no_ids", {"tokens": inference_pb2.TokenIds()}, "INVALID_ARGUMENT", "prompt: is empty"),
    ("no_messages", {"chat": inference_pb2.Chat()}, "INVALID_ARGUMENT", "messages: is empty"),
    ("bad_role", {"chat": inference_pb2.Chat(messages=[{"role": "x"}])}, "INVALID_ARGUMENT", "messages[0].role"),
    ("id_out_of_range", {"tokens": inference_pb2.TokenIds(ids=[1 << 31])}, "INVALID_ARGUMENT", "outside of 0 .."),
    ("too_long", {"tokens": inference_pb2.TokenIds(ids=[1] * 300)}, "INVALID_ARGUMENT", "45 more than the 255"),
    ("too_long_text", {"text": "a" * 300}, "INVALID_ARGUMENT", "45 more than the 255"),
    ("far_too_long_text", {"text": "a" * 100_000}, "INVALID_ARGUMENT", "at least"),
    ("nan", sampling(temperature=float("nan")), "INVALID_ARGUMENT", "temperature: is nan"),
    ("infinite", sampling(temperature=float("inf")), "INVALID_ARGUMENT", "temperature: is inf"),
    ("negative", sampling(temperature=-1), "INVALID_ARGUMENT", "temperature"),
    ("top_p", sampling(top_p=1.5), "INVALID_ARGUMENT", "top_p"),
    ("max_tokens_0", sampling(max_tokens=0), "INVALID_ARGUMENT", "max_tokens: is 0"),
    ("max_tokens_huge", sampling(max_tokens=4_000_000_000), "INVALID_ARGUMENT", "at most 254 fit"),
    ("min_over_max", sampling(max_tokens=2, min_tokens=3), "INVALID_ARGUMENT", "min_tokens"),
    ("bias", sampling(logit_bias={99_999: 1}), "INVALID_ARGUMENT", "logit_bias: token id 99999"),
    ("stop_empty", sampling(stop=[""]), "INVALID_ARGUMENT", "stop[0]: is empty"),
    ("stop_many", sampling(stop=["x"] * 17), "INVALID_ARGUMENT", "at most 16"),
    ("logprobs", sampling(logprobs=21), "INVALID_ARGUMENT", "logprobs"),
    ("request_id", {"text": "hi", "request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id: has 129 bytes"),
    ("unknown_model", {"text": "hi", "model": "gpt"}, "NOT_FOUND", "'gpt' is not served"),
    ("expected_model", {"text": "hi", "model": "later"}, "UNAVAILABLE", "later"),
]


@pytest.mark.parametrize(("given", "status", "says"), [row[1:] for row in INVALID], ids=[row[0] for row in INVALID])
async def test_invalid_input_has_its_status_and_names_its_field(
    start: Start, given: dict[str, object] | bytes, status: str, says: str
) -> None:
    front = await start()
    body = given if isinstance(given, bytes) else inference_pb2.GenerateRequest(**given).SerializeToString()
    caught = await failure(front, body)
    assert caught.code().name == status
    assert says in caught.details()
    assert not front.conductor.submitted
    assert text_of(await generate(front, text="hi")) == "hello world"


async def test_a_message_over_the_limit_is_exhausted_without_a_retry_hint(start: Start) -> None:
    front = await start()
    caught = await failure(front, b"\x00" * (limits.BODY_BYTES_MAX + 1))
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "retry-after-ms" not in {key for key, _ in caught.trailing_metadata()}


async def test_the_cluster_shows_instances_models_and_live_requests(start: Start) -> None:
    front = await start(saying("x", hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        await call.read()
        view = await stub.GetCluster(inference_pb2.GetClusterRequest())
        call.cancel()
    assert [(one.name, one.role, one.state, one.pages_free) for one in view.instances] == [
        ("p0", "prefill", "ready", 60),
        ("d0", "decode", "ready", 60),
    ]
    assert [(model.name, model.max_model_len) for model in view.models] == [("toy", 256)]
    assert view.requests_live == 1 and view.version


async def test_closing_the_gateway_ends_streams_with_unavailable(start: Start) -> None:
    front = await start(saying("hello", hang=True))
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi"))
        await call.read()
        await front.gateway.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_64_streams_at_once_are_all_right(start: Start) -> None:
    front = await start(
        lambda request: Script(tokens=tokens_of(f"answer to {client_id(request)}"), finish="length", step_s=0.001)
    )
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one(name: str) -> str:
            call = stub.Generate(inference_pb2.GenerateRequest(text="hi", request_id=name))
            return text_of([response async for response in call])

        answers = await asyncio.gather(*(one(f"r{index}") for index in range(64)))
    assert answers == [f"answer to r{index}" for index in range(64)]
