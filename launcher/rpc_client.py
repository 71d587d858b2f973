"""A cluster's front door as seen from a terminal: generate, cancel, look. Plain records out, gRPC inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
import msgspec
from segue_proto.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

from segue.pool_messages import InstanceChange, InstanceState, ScaleDone

CONNECT_S_MAX = 5.0
MESSAGE_BYTES_MAX = 64 << 20


class ClientError(Exception):
    """What to tell the user: `message`, and the gRPC status behind it."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer."""

    text: str
    tokens: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an answer. Times in microseconds since the request's arrival at the gateway."""

    reason: str
    tokens_prompt: int
    tokens_generated: int
    tokens_cached: int
    request_id: str = ""
    """For `explain`."""
    first_token_us: int
    finished_us: int
    prefill_instance: str
    decode_instance: str
    attempts: int

    @property
    def tpot_us(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two."""
        if self.tokens_generated < 2:
            return None
        return (self.finished_us - self.first_token_us) / (self.tokens_generated - 1)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    state: str
    model: str
    running: int
    waiting: int
    tokens_queued: int
    pages_total: int
    pages_free: int
    pages_active: int
    pages_cached: int
    pages_held: int
    pages_quarantined: int
    block_size: int
    preemptions: int
    pid: int


class Model(msgspec.Struct, frozen=True):
    name: str
    architecture: str
    max_model_len: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    instances: list[Instance]
    models: list[Model]
    requests_queued: int
    requests_live: int
    version: str


class ExplainedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. Times in microseconds from the decision on; 0 unless `is_predicted`."""

    prefill: str
    decode: str
    source: str
    cost: float
    tokens_compute: int
    tokens_cached: int
    verdict: str
    is_predicted: bool
    queue_us: float
    ttft_us: float
    ttft_q90_us: float
    batch: float
    tpot_us: float
    tpot_q90_us: float


class ExplainedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Why one attempt was placed or rejected as it was. `ttft_us` and `tpot_us` are actual; 0: not known."""

    request_id: str
    attempt: int
    tenant: str
    priority: int
    tokens_known: int
    waited_us: int
    decision: str
    reason: str
    choices: list[ExplainedChoice]
    choices_total: int
    ttft_us: int
    tpot_us: float
    age_us: int
    """Since the decision; of recent ones only."""
    prefill_let_go: bool
    """The decode instance had all but one block of the prompt, and computed the rest itself."""
    ended: str
    """Why it is over; empty: it runs."""

    @property
    def chosen(self) -> ExplainedChoice | None:
        return next((choice for choice in self.choices if choice.verdict == "chosen"), None)

    tokens_generated: int


class SegueClient:
    """One connection; use as a context manager. Every call raises ClientError."""

    def __init__(self, address: str) -> None:
        self.address = address
        options = [("grpc.max_send_message_length", MESSAGE_BYTES_MAX)]
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> SegueClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def connect(self) -> None:
        """Raises ClientError when nothing listens, or when it is no gateway that does."""
        try:
            self.cluster()
        except ClientError as error:
            message = f"no Segue gateway answers at {self.address} ({error}); is `segue up` running?"
            raise ClientError(message, error.status) from error

    def generate(
        self,
        prompt: str | Sequence[Turn],
        *,
        model: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Iterator[Text | Finished]:
        """Pieces of the answer to a text or a conversation, then its end. None leaves an option to the server."""
        given = {name: value for name, value in sampling.items() if value is not None}
        request = inference_pb2.GenerateRequest(
            model=model, tenant=tenant, priority=priority, sampling=inference_pb2.SamplingParams(**given)
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.messages.extend(
                inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in prompt
            )
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            request_id = ""
            for response in call:
                match response.WhichOneof("event"):
                    case "started":
                        request_id = response.started.request_id
                    case "delta":
                        yield Text(response.delta.text, len(response.delta.token_ids))
                    case "finished":
                        yield msgspec.structs.replace(_finished(response.finished), request_id=request_id)
        except grpc.RpcError as error:
            raise _client_error(error) from error
        finally:
            call.cancel()

    def explain(self, request_id: str) -> list[ExplainedAttempt]:
        """Recent attempts of a request, the oldest first; none when it is not remembered."""
        return self._explain(inference_pb2.ExplainRequest(request_id=request_id))

    def recent(self, count: int) -> list[ExplainedAttempt]:
        """The latest decisions, the newest first."""
        return self._explain(inference_pb2.ExplainRequest(recent_max=count))

    def _explain(self, request: inference_pb2.ExplainRequest) -> list[ExplainedAttempt]:
        try:
            answer = self._stub.Explain(request, timeout=CONNECT_S_MAX)
        except grpc.RpcError as error:
            raise _client_error(error) from error
        return [_explained(attempt) for attempt in answer.attempts]

    def cluster(self) -> Cluster:
        try:
            view = self._stub.GetCluster(inference_pb2.GetClusterRequest(), timeout=CONNECT_S_MAX)
        except grpc.RpcError as error:
            raise _client_error(error) from error
        return Cluster(
            instances=[_instance(one) for one in view.instances],
            models=[Model(one.name, one.architecture, one.max_model_len) for one in view.models],
            requests_queued=view.requests_queued,
            requests_live=view.requests_live,
            version=view.version,
        )

    def scale(self, pool: str, instances: int) -> Iterator[InstanceChange | ScaleDone]:
        """What happens until the pool has so many instances; ScaleDone is the last."""
        stub = cluster_pb2_grpc.ClusterStub(self._channel)
        call = stub.Scale(cluster_pb2.ScaleRequest(pool=pool, instances=instances))
        try:
            for event in call:
                if event.WhichOneof("event") == "done":
                    yield ScaleDone(event.done.instances)
                else:
                    yield InstanceChange(event.change.name, InstanceState(event.change.state), event.change.reason)
        except grpc.RpcError as error:
            raise _client_error(error) from error
        finally:
            call.cancel()


def _finished(message: inference_pb2.Finished) -> Finished:
    name = inference_pb2.FinishReason.Name(message.reason)
    return Finished(
        reason=name.removeprefix("FINISH_REASON_").lower(),
        tokens_prompt=message.usage.tokens_prompt,
        tokens_generated=message.usage.tokens_generated,
        tokens_cached=message.usage.tokens_cached,
        first_token_us=message.timing.first_token_us,
        finished_us=message.timing.finished_us,
        prefill_instance=message.prefill_instance,
        decode_instance=message.decode_instance,
        attempts=message.attempts,
    )


def _explained(message: inference_pb2.ExplainedAttempt) -> ExplainedAttempt:
    names = [name for name in ExplainedAttempt.__struct_fields__ if name != "choices"]
    choices = [_choice(choice) for choice in message.choices]
    return ExplainedAttempt(choices=choices, **{name: getattr(message, name) for name in names})


def _choice(message: inference_pb2.ConsideredChoice) -> ExplainedChoice:
    own = ("prefill", "decode", "source", "cost", "tokens_compute", "tokens_cached", "verdict")
    predicted = ("queue_us", "ttft_us", "ttft_q90_us", "batch", "tpot_us", "tpot_q90_us")
    values = {name: getattr(message, name) for name in own}
    values |= {name: getattr(message.terms, name) for name in predicted}
    return ExplainedChoice(is_predicted=message.HasField("terms"), **values)


def _instance(message: inference_pb2.Instance) -> Instance:
    return Instance(**{name: getattr(message, name) for name in Instance.__struct_fields__})


def _client_error(error: grpc.RpcError) -> ClientError:
    status: str = error.code().name
    text = error.details() or "no details"
    retry_ms = dict(error.trailing_metadata() or ()).get("retry-after-ms")
    hint = f" (try again in {int(retry_ms) / 1000:g} s)" if retry_ms else ""
    return ClientError(f"{text}{hint}", status)
