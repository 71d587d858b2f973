"""A live cluster with objectives: decisions are explained, predictions become calibrated, what would miss an objective
is turned away with a time to come back, and the recording of all this replays to the same decisions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from cluster_process import SEGUE, ClusterProcess
from grpc_client import collect
from segue_proto.v1 import inference_pb2

from conductor.recording import Step, first_difference, read_recording

REQUESTS = 44


class Recorded:
    def __init__(self, cluster: ClusterProcess, path: Path) -> None:
        self.cluster = cluster
        self.path = path


@pytest.fixture(scope="module")
def recorded(
    toy_folder: Path, toy_reference: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    path = tmp_path_factory.mktemp("recording") / "conductor.rec"
    options = ["--model", str(toy_folder), "--local-processes", "--kv-memory", "64MiB", "--record", str(path)]
    cluster = ClusterProcess([*options, "--slo", "ttft=30,tpot=10", "--tenant-weight", "gold=3"])
    try:
        cluster.wait_ready()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: serve(cluster, n), range(REQUESTS)))
        yield Recorded(cluster, path)
    finally:
        cluster.close()


def serve(cluster: ClusterProcess, number: int) -> None:
    request = inference_pb2.GenerateRequest(request_id=f"r{number}", tenant="gold" if number % 2 else "", priority=-1)
    request.tokens.ids.extend((7 * number + step) % 60 + 3 for step in range(24 + 8 * (number % 5)))
    request.sampling.max_tokens, request.sampling.ignore_eos = 8 + number % 5, True
    assert collect(cluster.grpc, request).finished is not None


def explained(cluster: ClusterProcess, request_id: str) -> subprocess.CompletedProcess[str]:
    command = [str(SEGUE), "explain", "--address", cluster.grpc, request_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "160"})


def test_a_decision_is_explained_with_what_was_predicted_and_what_came(recorded: Recorded) -> None:
    done = explained(recorded.cluster, f"r{REQUESTS - 1}")
    assert done.returncode == 0, done.stderr
    for word in ("routed", "priority -1", "tenant gold", "meets the objectives", "prefill-0", "decode-0", "chosen"):
        assert word in done.stdout
    assert "TTFT: predicted" in done.stdout
    assert "regret" in done.stdout


def test_a_request_that_nobody_remembers_is_an_error(recorded: Recorded) -> None:
    done = explained(recorded.cluster, "nobody")
    assert done.returncode == 1
    assert "nobody" in done.stderr


def test_coverage_and_regret_are_metrics(recorded: Recorded) -> None:
    text = httpx.get(f"{recorded.cluster.http}/metrics", timeout=30).text
    assert 'segue:prediction_drifted{kind="ttft"' in text
    buckets = [line for line in text.splitlines() if line.startswith("segue:prediction_regret_seconds_bucket")]
    (counted,) = [line for line in buckets if 'kind="ttft"' in line and 'le="+Inf"' in line]
    assert 1 <= float(counted.rpartition(" ")[2]) <= REQUESTS


def test_a_live_recording_replays_to_the_same_decisions(recorded: Recorded) -> None:
    records = list(read_recording(recorded.path))
    steps = [record for record in records if isinstance(record, Step)]
    assert sum(len(step.decisions) for step in steps) >= REQUESTS
    assert first_difference(records) is None


def test_what_would_miss_the_objective_is_told_when_to_come_back(
    toy_folder: Path, toy_reference: torch.nn.Module
) -> None:
    cost = toy_folder.parent / "slow.json"
    cost.write_text(
        '{"prefill": {"base_us": 9e6, "token_us": 1e3, "pair_us": 0.0}, "kv_token_bytes": 1,'
        ' "decode": {"base_us": 9e6, "row_us": 1.0, "kv_token_us": 0.0}}'
    )
    options = ["--model", str(toy_folder), "--local-processes", "--kv-memory", "64MiB", "--cost-model", str(cost)]
    cluster = ClusterProcess([*options, "--slo", "tpot=0.1,ttft=0.5,ttft_factor=0"])
    try:
        cluster.wait_ready()
        request = inference_pb2.GenerateRequest(text="Nine seconds a step, says the model of costs.")
        with pytest.raises(grpc.RpcError) as caught:
            collect(cluster.grpc, request)
        trailing = dict(caught.value.trailing_metadata())
        assert (caught.value.code(), trailing["resource"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "prefill")
        assert int(trailing["retry-after-ms"]) > 0
        assert "TTFT" in caught.value.details()
        answer = httpx.post(
            f"{cluster.http}/v1/completions", json={"prompt": "Nine seconds", "priority": 3}, timeout=30
        )
        assert (answer.status_code, answer.json()["error"]["resource"]) == (429, "prefill")
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        cluster.close()
