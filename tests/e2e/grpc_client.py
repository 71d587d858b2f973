"""The least a gRPC client needs: one call, its events collected."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from segue_proto.v1 import inference_pb2, inference_pb2_grpc


@dataclass
class Generation:
    started: inference_pb2.Started | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    deltas: int = 0
    finished: inference_pb2.Finished | None = None


def generate(address: str, prompt: str | list[int], **sampling: object) -> Generation:
    """Greedy unless told otherwise; 24 tokens, and EOS is ignored, so that runs compare position by position."""
    settings = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**settings))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    return collect(address, request)


def collect(address: str, request: inference_pb2.GenerateRequest) -> Generation:
    result = Generation()
    with grpc.insecure_channel(address) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120):
            add(result, response)
    return result


def add(result: Generation, response: inference_pb2.GenerateResponse) -> None:
    kind = response.WhichOneof("event")
    if kind == "started":
        result.started = response.started
    elif kind == "finished":
        result.finished = response.finished
    else:
        result.token_ids += response.delta.token_ids
        result.text += response.delta.text
        result.deltas += 1


def cluster_view(address: str) -> inference_pb2.GetClusterResponse:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return stub.GetCluster(inference_pb2.GetClusterRequest(), timeout=20)


@dataclass
class InferenceEvents:
    """Kinds of events as they came, equal neighbours as one; what was said of the prompt."""

    kinds: list[str] = field(default_factory=list)
    prompt: list[inference_pb2.PromptToken] = field(default_factory=list)


def prompt_events(address: str, prompt: list[int], **sampling: object) -> InferenceEvents:
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling))
    request.tokens.ids.extend(prompt)
    found = InferenceEvents()
    with grpc.insecure_channel(address) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120):
            kind = response.WhichOneof("event")
            if found.kinds[-1:] != [kind]:
                found.kinds.append(kind)
            found.prompt += response.prompt_logprobs.tokens
    return found
