"""The committed generated code says what the .proto files say, whatever protoc made it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

PROTO = Path(__file__).parent.parent / "proto"
FILES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("segue_proto/v1/*.proto"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What the installed protoc makes of the .proto files."""
    target = tmp_path_factory.mktemp("proto") / "set.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={target}", *FILES]
    subprocess.run(command, cwd=PROTO, check=True, timeout=60)
    found = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
    return {file.name: file for file in found.file}


def committed(name: str) -> descriptor_pb2.FileDescriptorProto:
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    return descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def without_json_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """protoc writes json_name into descriptor sets but not into generated code."""

    def strip(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            strip(nested)

    for message in file.message_type:
        strip(message)
    return file


def test_there_are_proto_files() -> None:
    assert "segue_proto/v1/inference.proto" in FILES


@pytest.mark.parametrize("name", FILES)
def test_committed_code_matches_its_proto_file(
    name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    assert without_json_names(committed(name)) == without_json_names(compiled[name]), "run `make proto`"


@pytest.mark.parametrize("name", FILES)
def test_every_service_has_committed_stubs(name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2_grpc")
    for service in compiled[name].service:
        servicer = getattr(module, service.name + "Servicer")
        assert all(hasattr(servicer, method.name) for method in service.method), "run `make proto`"
