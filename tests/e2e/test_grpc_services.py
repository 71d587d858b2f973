"""What `grpcurl` and load balancers use: reflection and the standard health service; and errors with their status."""

from __future__ import annotations

import grpc
import pytest
from cluster_process import ClusterProcess
from google.protobuf import descriptor_pb2
from grpc_client import generate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


def test_reflection_lists_the_public_service_and_describes_it(local_cluster: ClusterProcess) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="segue.v1.Inference"),
    ]
    with grpc.insecure_channel(local_cluster.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        services, described = stub.ServerReflectionInfo(iter(requests), timeout=20)
    assert "segue.v1.Inference" in {service.name for service in services.list_services_response.service}
    (encoded,) = described.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(encoded)
    assert {method.name for method in file.service[0].method} == {"Generate", "Cancel", "GetCluster", "Explain"}


@pytest.mark.parametrize("service", ["", "segue.v1.Inference"])
def test_health_says_serving(local_cluster: ClusterProcess, service: str) -> None:
    with grpc.insecure_channel(local_cluster.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ([], {}, "prompt"),
        ([5] * 600, {}, "512"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([10_000], {}, "257"),
    ],
)
def test_bad_field_is_invalid_argument_and_named(
    local_cluster: ClusterProcess, prompt: list[int], sampling: dict[str, object], word: str
) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        generate(local_cluster.grpc, prompt, **sampling)
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert word in failed.value.details()
