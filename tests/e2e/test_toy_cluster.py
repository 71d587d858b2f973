"""Whole clusters of a toy model, in each of the three ways to run one: the same tokens as transformers, and no leak."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from cluster_process import ClusterProcess
from grpc_client import Generation, add, cluster_view, generate
from segue_proto.v1 import inference_pb2, inference_pb2_grpc
from toy_model import MAX_MODEL_LEN, worst_gap

LOGIT_TOLERANCE = 0.002
"""fp32 sums in another order; a wrong position or page is off by whole logits."""


@pytest.fixture(params=["local_cluster", "aggregated_cluster", "ray_cluster"])
def cluster(request: pytest.FixtureRequest) -> ClusterProcess:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, ClusterProcess)
    return found


def prompt_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 48, 49, 200, MAX_MODEL_LEN - 24])
def test_greedy_tokens_equal_the_reference(
    cluster: ClusterProcess, toy_reference: torch.nn.Module, length: int
) -> None:
    prompt = prompt_of(length)
    result = generate(cluster.grpc, prompt)
    assert len(result.token_ids) == 24
    assert worst_gap(toy_reference, prompt, result.token_ids) <= LOGIT_TOLERANCE


def test_many_at_once_get_the_tokens_they_get_alone(cluster: ClusterProcess) -> None:
    prompts = [prompt_of(length, seed=2) for length in (3, 20, 33, 64, 90, 120, 121, 250)]
    alone = [generate(cluster.grpc, prompt).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: generate(cluster.grpc, prompt).token_ids, prompts))
    assert together == alone


@pytest.mark.parametrize("length", [64, 65, 79])
def test_repeated_prompt_is_reused_up_to_its_last_full_block(cluster: ClusterProcess, length: int) -> None:
    """A prompt that is cached as a whole still has its last token computed."""
    prompt = prompt_of(length, seed=3)
    first, again = generate(cluster.grpc, prompt), generate(cluster.grpc, prompt)
    assert first.finished is not None
    assert again.finished is not None
    assert first.finished.usage.tokens_cached == 0
    assert (length - 1) // 16 * 16 <= again.finished.usage.tokens_cached <= length - 1
    assert again.token_ids == first.token_ids


def test_answer_names_the_instances_that_served_it(cluster: ClusterProcess) -> None:
    instances = {instance.name: instance.role for instance in cluster_view(cluster.grpc).instances}
    finished = generate(cluster.grpc, prompt_of(70, seed=4)).finished
    assert finished is not None
    if "aggregated" in instances.values():
        assert (finished.prefill_instance, instances[finished.decode_instance]) == ("", "aggregated")
    else:
        assert (instances[finished.prefill_instance], instances[finished.decode_instance]) == ("prefill", "decode")


def test_usage_and_finish_reason(cluster: ClusterProcess) -> None:
    result = generate(cluster.grpc, prompt_of(40, seed=5), max_tokens=7)
    assert result.finished is not None
    assert result.finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert (result.finished.usage.tokens_prompt, result.finished.usage.tokens_generated) == (40, 7)


def test_request_that_ends_with_its_first_token(cluster: ClusterProcess, toy_reference: torch.nn.Module) -> None:
    prompt = prompt_of(50, seed=6)
    result = generate(cluster.grpc, prompt, max_tokens=1)
    assert len(result.token_ids) == 1
    assert worst_gap(toy_reference, prompt, result.token_ids) <= LOGIT_TOLERANCE


def test_tokens_arrive_while_the_rest_is_computed(cluster: ClusterProcess) -> None:
    assert generate(cluster.grpc, prompt_of(30, seed=7), max_tokens=40).deltas > 10


def test_seed_decides_the_sample(cluster: ClusterProcess) -> None:
    prompt = prompt_of(30, seed=8)
    first, same, other = (generate(cluster.grpc, prompt, temperature=1.0, seed=seed).token_ids for seed in (11, 11, 12))
    assert first == same
    assert first != other


def pages_in_use(address: str) -> int:
    return sum(
        instance.pages_active + instance.pages_held + instance.pages_quarantined
        for instance in cluster_view(address).instances
    )


def eventually_idle(address: str, seconds_max: float = 15.0) -> bool:
    """Load reports say that no page is in use; they come at least every second."""
    deadline = time.monotonic() + seconds_max
    while pages_in_use(address) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pages_in_use(address) == 0


def test_cancelled_request_ends_and_frees_its_pages(cluster: ClusterProcess) -> None:
    request = inference_pb2.GenerateRequest(request_id="to-be-cancelled")
    request.tokens.ids.extend(prompt_of(100, seed=9))
    request.sampling.max_tokens, request.sampling.ignore_eos = MAX_MODEL_LEN - 100, True
    result = Generation()
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(request, timeout=60)
        with pytest.raises(grpc.RpcError) as ended:
            for response in stream:
                add(result, response)
                if result.deltas == 2:
                    assert stub.Cancel(inference_pb2.CancelRequest(request_id="to-be-cancelled"), timeout=10).found
    assert ended.value.code() == grpc.StatusCode.CANCELLED
    assert eventually_idle(cluster.grpc)


def test_client_that_goes_away_frees_its_pages(cluster: ClusterProcess) -> None:
    request = inference_pb2.GenerateRequest()
    request.tokens.ids.extend(prompt_of(100, seed=10))
    request.sampling.max_tokens, request.sampling.ignore_eos = MAX_MODEL_LEN - 100, True
    with grpc.insecure_channel(cluster.grpc) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        next(stream)
        stream.cancel()
    assert eventually_idle(cluster.grpc)


def test_idle_cluster_holds_no_page_after_a_burst(cluster: ClusterProcess) -> None:
    threads = [threading.Thread(target=generate, args=(cluster.grpc, prompt_of(60 + i, seed=11))) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually_idle(cluster.grpc)
