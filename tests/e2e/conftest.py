"""Clusters are started once a session and shared: starting one costs seconds, a request milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster_process import ClusterProcess, running
from toy_model import write_toy_model

from launcher.demo_model import demo_model_path

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "toy-llama"


@pytest.fixture(scope="session")
def toy_reference(toy_folder: Path) -> torch.nn.Module:
    return write_toy_model(toy_folder)


@pytest.fixture(scope="session")
def local_cluster(toy_folder: Path, toy_reference: torch.nn.Module) -> Iterator[ClusterProcess]:
    """1 prefill + 1 decode as plain processes; chunks of 48 tokens, so that prompts take several."""
    options = ("--local-processes", "--kv-memory", "64MiB", "--max-num-batched-tokens", "48")
    yield from running("--model", str(toy_folder), *options)


@pytest.fixture(scope="session")
def aggregated_cluster(toy_folder: Path, toy_reference: torch.nn.Module) -> Iterator[ClusterProcess]:
    yield from running("--model", str(toy_folder), "--local-processes", "--aggregated", "1", "--kv-memory", "64MiB")


@pytest.fixture(scope="session")
def ray_cluster(toy_folder: Path, toy_reference: torch.nn.Module) -> Iterator[ClusterProcess]:
    options = ("--prefill", "1", "--decode", "1", "--kv-memory", "64MiB")
    yield from running("--model", str(toy_folder), *options)


@pytest.fixture(scope="session")
def demo_cluster() -> Iterator[ClusterProcess]:
    """What `make serve` runs, but for the ports."""
    yield from running("--model", str(demo_model_path()), "--served-model-name", "SmolLM2-135M-Instruct")
