"""The Inference service. Handlers take and return bytes: a message that is not valid (bad UTF-8 too) is the caller's
INVALID_ARGUMENT, not an UNKNOWN from inside of the library, and a delta is serialised once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from segue_proto.v1 import inference_pb2

from conductor.core.decision_log import DECISIONS_KEPT
from conductor.gateway.intake import Call, Intake
from conductor.gateway.live_request import LiveRequest
from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.model_catalog import UsableModel
from conductor.gateway.openai_prompts import template_messages
from conductor.gateway.request_fields import SamplingFields
from conductor.gateway.rpc_explain import RECENT_DECISIONS, explanations_to_pb, recent_to_pb
from conductor.gateway.rpc_peers import PeerCancels, is_forwarded
from conductor.gateway.rpc_status import Context, errors_to_status
from conductor.gateway.rpc_views import DeltaEncoder, cluster_to_pb, emit_to_pbs, finished_to_pb, started_to_pb
from conductor.gateway.validate import check_priority, check_request_id, check_tenant
from conductor.ports import ConductorPort
from segue import limits
from segue.errors import BodyTooLarge, Cancelled, InvalidField

SERVICE_NAME = "segue.v1.Inference"

M = TypeVar("M", bound=Message)

_SCALARS = (
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
    "skip_special_tokens",
)


class InferenceService:
    def __init__(
        self, intake: Intake, conductor: ConductorPort, metrics: RequestMetrics, version: str, peers: PeerCancels
    ) -> None:
        self._intake = intake
        self._conductor = conductor
        self._metrics = metrics
        self._version = version
        self._peers = peers

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Cancel": grpc.unary_unary_rpc_method_handler(self.cancel),
                "GetCluster": grpc.unary_unary_rpc_method_handler(self.get_cluster),
                "Explain": grpc.unary_unary_rpc_method_handler(self.explain),
            },
        )

    async def generate(self, body: bytes, context: Context) -> AsyncIterator[bytes]:
        async with errors_to_status(context, self._metrics):
            live, model = await self._accept(body, context)
            # grpc does not close a generator whose message could not be sent: its `finally` waits for the collector.
            context.add_done_callback(lambda _: self._intake.table.stop(live, Cancelled("the client is gone")))
            try:
                yield serialize(started_to_pb(live.session.spec))
                plain = DeltaEncoder()
                while (emit := await live.next()) is not None:
                    if emit.logprobs is None and emit.scores is None:
                        yield plain.encode(emit)
                        continue
                    for message in emit_to_pbs(emit, live.session.spec.prompt_ids, model.codec.token_text):
                        yield serialize(message)
                assert live.end is not None, "next() returns None only at the end"
                yield serialize(finished_to_pb(live.session.summary(), live.end))
            finally:
                self._intake.table.stop(live, Cancelled("the client is gone"))

    async def cancel(self, body: bytes, context: Context) -> bytes:
        async with errors_to_status(context, self._metrics):
            message = parse(body, inference_pb2.CancelRequest)
            if not message.request_id:
                raise InvalidField("request_id", "is empty")
            found = self._intake.table.cancel(message.request_id)
            if not is_forwarded(context):
                # Ids are each gateway's own, and behind one address nobody knows which gateway has the request.
                found = await self._peers.cancel(message.request_id) or found
            return serialize(inference_pb2.CancelResponse(found=found))

    async def get_cluster(self, body: bytes, context: Context) -> bytes:
        async with errors_to_status(context, self._metrics):
            parse(body, inference_pb2.GetClusterRequest)
            view = self._conductor.cluster()
            return serialize(cluster_to_pb(view, len(self._intake.table), self._version))

    async def explain(self, body: bytes, context: Context) -> bytes:
        async with errors_to_status(context, self._metrics):
            message = parse(body, inference_pb2.ExplainRequest)
            if not message.request_id:
                count = message.recent_max or RECENT_DECISIONS
                return serialize(recent_to_pb(self._conductor.recent_decisions(min(count, DECISIONS_KEPT))))
            return serialize(explanations_to_pb(self._conductor.explain(message.request_id)))

    async def _accept(self, body: bytes, context: Context) -> tuple[LiveRequest, UsableModel]:
        arrived_us = self._intake.table.now_us()
        message = parse(body, inference_pb2.GenerateRequest)
        check_request_id(message.request_id)
        check_tenant(message.tenant)
        check_priority(message.priority)
        model = await self._intake.catalog.usable(message.model)
        names = {"prompt": "messages"} if message.HasField("chat") else {}
        fields = sampling_fields(message.sampling, names)
        prompt_ids = await self._prompt_ids(message, model)
        checked = self._intake.check(model, prompt_ids, fields, max_tokens_default=None)
        remaining_s = context.time_remaining()
        call = Call(
            request_id=message.request_id or uuid.uuid4().hex,
            arrived_us=arrived_us,
            deadline_us=0 if remaining_s is None else self._intake.table.now_us() + int(remaining_s * 1e6),
            tenant=message.tenant,
            priority=message.priority,
        )
        return await self._intake.open(model, call, checked, asyncio.Event()), model

    async def _prompt_ids(self, message: inference_pb2.GenerateRequest, model: UsableModel) -> list[int]:
        match message.WhichOneof("prompt"):
            case "text" if message.text:
                return await self._intake.tokenize(model, message.text)
            case "tokens":
                return list(message.tokens.ids)
            case "chat":
                turns = [_turn(turn) for turn in message.chat.messages]
                return await self._intake.tokenize_chat(model, model.codec.render_chat(template_messages(turns)))
            case _:
                raise InvalidField("prompt", "is empty; at least 1 token is needed", code="prompt_empty")


def parse(body: bytes, kind: type[M]) -> M:
    """Raise BodyTooLarge or InvalidField for bytes that are not a `kind`."""
    if len(body) > limits.BODY_BYTES_MAX:
        raise BodyTooLarge(f"the message has {len(body)} bytes, at most {limits.BODY_BYTES_MAX} are allowed")
    message: M = kind()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidField("message", f"is not a valid {kind.DESCRIPTOR.full_name} (strings must be UTF-8)") from error
    return message


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def sampling_fields(message: inference_pb2.SamplingParams, names: dict[str, str]) -> SamplingFields:
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingFields(
        logit_bias=dict(message.logit_bias),
        stop_token_ids=list(message.stop_token_ids),
        stop=list(message.stop),
        names=names,
        **given,
    )


def _turn(message: inference_pb2.ChatMessage) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return {**turn, "name": message.name} if message.name else turn
