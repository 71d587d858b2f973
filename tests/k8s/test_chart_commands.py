"""The commands that the chart gives to containers, run as the kubelet would: they must make a cluster that answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart import container, pod_templates, pools, render
from toy_model import write_toy_model

START_SECONDS_MAX = 120
SMALL = {"kvMemoryMi": 64, "threads": 1}


@contextmanager
def running(own: dict[str, Any], uid: str) -> Iterator[subprocess.Popen[bytes]]:
    """The container's command with its variables written in; ended by SIGTERM, after which it must have said 0."""
    facts = {"POD_NAME": f"demo-{uid}", "POD_UID": uid, "POD_IP": "127.0.0.1"}
    environment = {
        entry["name"]: re.sub(r"\$\((\w+)\)", lambda match: facts[match[1]], entry["value"]).replace(
            "demo-segue-workers", "127.0.0.1"
        )
        for entry in own["env"]
        if "value" in entry
    }
    process = subprocess.Popen(own["command"], env={**os.environ, **environment, "PATH": search_path()})
    try:
        yield process
    finally:
        process.terminate()
        status = process.wait(timeout=60)
    assert status == 0


def search_path() -> str:
    """As in the image: `python` is the one that Segue is installed for."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def status(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False).status_code
    except httpx.TransportError:
        return 0


def wait_for(url: str, wanted: int) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while (seen := status(url)) != wanted:
        assert time.monotonic() < deadline, f"{url} answers {seen}, not {wanted}"
        time.sleep(0.1)


@pytest.mark.slow
def test_front_prefill_and_decode_make_a_cluster_that_answers(tmp_path: Path) -> None:
    write_toy_model(tmp_path / "toy")
    front_values = {"grpcPort": free_port(), "httpPort": free_port()}
    model = {"path": str(tmp_path / "toy"), "name": "toy"}
    objects = render({"prefill": SMALL, "decode": SMALL, "model": model, "front": front_values})
    front = container(pod_templates(objects)["front"], "front")
    prefill, decode = (container(pools(objects)[role], "instance") for role in ("prefill", "decode"))
    base = f"http://127.0.0.1:{front_values['httpPort']}"
    ready = base + front["readinessProbe"]["httpGet"]["path"]
    with running(front, "front"):
        wait_for(base + front["livenessProbe"]["httpGet"]["path"], 200)
        assert status(ready) == 503
        with running(prefill, "0f9c"), running(decode, "71d2"):
            wait_for(ready, 200)
            body = {"model": "toy", "prompt": "Once upon a time, " * 4, "max_tokens": 5, "ignore_eos": True}
            answer = httpx.post(base + "/v1/completions", json=body, timeout=60, trust_env=False)
            assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 5


def test_a_configuration_that_the_program_refuses_ends_the_container() -> None:
    front = container(pod_templates(render())["front"], "front")
    broken = {**os.environ, "PATH": search_path(), "SEGUE_CONFIG": '{"grpc_prot": 1}'}
    ended = subprocess.run(front["command"], env=broken, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "grpc_prot" in ended.stderr
