"""However a cluster ends, nothing of it is left: processes, folder and sockets in it, shared memory."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from cluster_process import ClusterProcess, eventually_none_alive, shared_memory
from grpc_client import generate

from launcher.runtime_dir import stale_clusters, sweep_stale_clusters

StartCluster = Callable[..., ClusterProcess]

WAYS = {"local": ["--local-processes"], "ray": []}


@pytest.fixture
def start(toy_folder: Path, toy_reference: torch.nn.Module) -> Iterator[StartCluster]:
    started: list[ClusterProcess] = []

    def start_cluster(*options: str) -> ClusterProcess:
        started.append(ClusterProcess(["--model", str(toy_folder), "--kv-memory", "64MiB", *options]))
        return started[-1]

    yield start_cluster
    for cluster in started:
        cluster.close()


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_leaves_nothing(start: StartCluster, way: str) -> None:
    cluster = start(*WAYS[way])
    cluster.wait_ready()
    generate(cluster.grpc, list(range(40)))
    folder, processes = cluster.runtime_dir(), cluster.descendants()
    assert len(processes) >= 3
    cluster.press_ctrl_c()
    assert cluster.wait_end() == 0
    assert eventually_none_alive(processes) == []
    assert not folder.exists()
    assert shared_memory(folder.name) == []


def test_sigterm_during_start_leaves_nothing(start: StartCluster) -> None:
    cluster = start("--local-processes")
    cluster._read_until(lambda: "gateway serve" in cluster.output, 60)
    folder, processes = cluster.runtime_dir(), cluster.descendants()
    cluster.send(signal.SIGTERM)
    assert cluster.wait_end() == 0
    assert eventually_none_alive(processes) == []
    assert not folder.exists()


def test_killed_launcher_takes_its_processes_along_and_the_next_one_sweeps(start: StartCluster) -> None:
    cluster = start("--local-processes", "--aggregated", "1")
    cluster.wait_ready()
    folder, processes = cluster.runtime_dir(), cluster.descendants()
    cluster.send(signal.SIGKILL)
    cluster.wait_end()
    assert eventually_none_alive(processes) == []
    assert folder in stale_clusters()
    assert folder in sweep_stale_clusters()
    assert not folder.exists()
    assert shared_memory(folder.name) == []


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_cluster_ends_with_a_daemon_of_ray(start: StartCluster, daemon: str) -> None:
    """Its instances could neither be watched nor be started again."""
    cluster = start()
    cluster.wait_ready()
    processes, folder = cluster.descendants(), cluster.runtime_dir()
    next(process for process in processes if process.name() == daemon).kill()
    assert cluster.wait_end() == 1
    assert f"Ray's {daemon} ended with status -9" in cluster.output
    assert eventually_none_alive(processes) == []
    assert not folder.exists()
    assert shared_memory(folder.name) == []


@pytest.mark.parametrize("way", [pytest.param("local", marks=pytest.mark.slow), "ray"])
def test_dead_instance_is_reported_and_started_again(start: StartCluster, way: str) -> None:
    cluster = start(*WAYS[way], "--aggregated", "1")
    cluster.wait_ready()
    prompt = list(range(40))
    tokens = generate(cluster.grpc, prompt).token_ids
    dead = instance_process(cluster.descendants(), way)
    os.kill(dead.pid, signal.SIGKILL)
    cluster.wait_for_text("aggregated-0 is ready")
    assert "aggregated-0" in cluster.output
    assert "out of memory" in cluster.output
    assert generate(cluster.grpc, prompt).token_ids == tokens
    assert instance_process(cluster.descendants(), way).pid != dead.pid
    assert len(shared_memory(cluster.runtime_dir().name)) <= 1, "the dead instance's pool is still there"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_hung_instance_is_killed_and_started_again(start: StartCluster, way: str) -> None:
    cluster = start(*WAYS[way], "--aggregated", "1")
    cluster.wait_ready()
    hung = instance_process(cluster.descendants(), way)
    os.kill(hung.pid, signal.SIGSTOP)
    cluster.wait_for_text("does not hear it")
    cluster.wait_for_text("aggregated-0 is ready")
    assert len(generate(cluster.grpc, list(range(40))).token_ids) == 24
    assert not hung.is_running()


def instance_process(processes: list[psutil.Process], way: str) -> psutil.Process:
    mark = {"local": "decode_worker.app", "ray": "InstanceActor"}[way]
    return next(process for process in processes if mark in " ".join(process.cmdline()))


def test_taken_port_is_reported_with_the_option(start: StartCluster) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        cluster = start("--local-processes", "--grpc-port", str(port))
        assert cluster.wait_end() == 2
    assert "--grpc-port" in cluster.output
    assert "in use" in cluster.output


def test_broken_model_is_reported_with_the_log_of_who_failed(start: StartCluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = start("--local-processes", "--aggregated", "1", "--model", str(tmp_path))
    assert cluster.wait_end() == 1
    assert "aggregated-0 exited" in cluster.output
