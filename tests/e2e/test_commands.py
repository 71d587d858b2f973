"""The `segue` commands as a person types them, against a running cluster of the toy model."""

from __future__ import annotations

import importlib.metadata
import subprocess

from cluster_process import SEGUE, ClusterProcess


def segue(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SEGUE), *words], input=typed, capture_output=True, text=True, timeout=120, check=False)


def test_generate_streams_and_ends_with_what_it_cost(local_cluster: ClusterProcess) -> None:
    prompt = "Longer than one block, so that a prefill instance is worth it. "
    length = ("--max-tokens", "8", "--ignore-eos")
    done = segue("generate", "--address", local_cluster.grpc, *length, prompt)
    assert done.returncode == 0, done.stderr
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    for word in ("TTFT", "TPOT", "8", "cached", "prefill-0", "decode-0"):
        assert word in last


def test_chat_answers_each_turn(local_cluster: ClusterProcess) -> None:
    done = segue("chat", "--address", local_cluster.grpc, "--max-tokens", "8", typed="Hello\nAnd more\n")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("TTFT") == 2


def test_status_lists_every_instance(local_cluster: ClusterProcess) -> None:
    done = segue("status", "--address", local_cluster.grpc)
    assert done.returncode == 0, done.stderr
    assert "prefill-0" in done.stdout
    assert "decode-0" in done.stdout


def test_no_cluster_is_an_error_that_says_so() -> None:
    done = segue("status", "--address", "127.0.0.1:1")
    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stdout + done.stderr


def test_version() -> None:
    assert segue("version").stdout.strip() == importlib.metadata.version("segue")


def test_up_without_a_model_says_what_is_needed() -> None:
    done = segue("up")
    assert done.returncode == 2
    assert "--model" in done.stdout + done.stderr
