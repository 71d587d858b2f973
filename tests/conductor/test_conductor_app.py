import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
from conductor_world import manifest
from front_process import worker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.app import Endpoints, run
from segue.config import FrontConfig
from segue.errors import ConfigError
from segue.manifest import Role

WITHOUT_TORCH_AND_RAY = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "ray", "transformers", "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
runpy.run_module("conductor.app", run_name="__main__")
"""


@contextmanager
def conductor_process(config: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH_AND_RAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(config + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    endpoints: dict[str, str] = json.loads(line)["ready"]
    return endpoints


def test_it_serves_without_torch_and_ray_and_ends_cleanly_on_sigterm() -> None:
    with conductor_process('{"grpc_port": 0, "http_port": 0}') as process:
        endpoints = ready(process)
        with grpc.insecure_channel(endpoints["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "segue.v1.Inference", "segue.v1.WorkerControl", "segue.v1.TokenLink"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            listed = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert {"segue.v1.Inference", "segue.v1.WorkerControl", "grpc.health.v1.Health"} <= set(listed)
        assert httpx.get(f"http://{endpoints['http']}/v1/models", timeout=20).json()["data"] == []
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(("port", "option"), [("grpc_port", "--grpc-port"), ("http_port", "--http-port")])
def test_a_port_in_use_is_named_with_its_option(port: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with conductor_process(json.dumps({"grpc_port": 0, "http_port": 0} | {port: number})) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert option in errors and str(number) in errors
    assert "Traceback" not in errors


def test_an_unknown_option_is_named() -> None:
    with conductor_process('{"grpc_prot": 0}') as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "grpc_prot" in errors


async def test_run_can_be_embedded_stopped_and_run_again() -> None:
    for _ in range(2):
        stop, announced = asyncio.Event(), asyncio.get_running_loop().create_future()
        config = FrontConfig(grpc_port=0, http_port=0)
        running = asyncio.create_task(run(config, stop, announced.set_result))
        endpoints: Endpoints = await announced
        port = int(endpoints.grpc.rpartition(":")[2])
        async with worker(port, manifest("d1", Role.DECODE)), httpx.AsyncClient() as client:
            while not (await client.get(f"http://{endpoints.http}/v1/models")).json()["data"]:
                await asyncio.sleep(0.01)
            stop.set()
            await running


async def test_a_request_during_the_shut_down_is_told_so() -> None:
    """Workers are still there: the front lingers for them."""
    stop, announced = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run(FrontConfig(grpc_port=0, http_port=0), stop, announced.set_result))
    endpoints: Endpoints = await announced
    port = int(endpoints.grpc.rpartition(":")[2])
    async with worker(port, manifest("d1", Role.DECODE)) as attached, httpx.AsyncClient() as client:
        while not (await client.get(f"http://{endpoints.http}/v1/models")).json()["data"]:
            await asyncio.sleep(0.01)
        stop.set()
        async with grpc.aio.insecure_channel(endpoints.grpc) as channel:
            request = inference_pb2.GenerateRequest(text="Hello")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(inference_pb2_grpc.InferenceStub(channel).Generate(request)))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.value.details() == "this gateway is shutting down"
        answer = await client.post(f"http://{endpoints.http}/v1/completions", json={"model": "toy", "prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "this gateway is shutting down")
        await attached.close()
        await running


async def test_a_recording_that_cannot_be_written_is_named() -> None:
    config = FrontConfig(grpc_port=0, http_port=0, record="/no/such/folder/x.rec")
    with pytest.raises(ConfigError, match="--record"):
        await run(config, asyncio.Event(), print)
