"""Messages between Segue's processes change together with the wire version, never without it."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2
from msgspec import inspect
from segue_proto.v1 import worker_pb2

from segue.handoff_messages import ControlMessage
from segue.kv_events import PublishedMessage
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard
from segue.wire_version import WIRE_DIGEST, WIRE_VERSION

RECORDS = (InstanceManifest, ModelCard, ControlMessage, PublishedMessage)
STREAMED = ("WorkerMessage", "ConductorMessage", "TokenBatch", "TokenAck")


def record_lines(kinds: tuple[Any, ...]) -> list[str]:
    """One line for each msgpack record that can be met in `kinds`."""
    lines: dict[str, str] = {}

    def spell(node: Any) -> str:
        match node:
            case inspect.StructType(cls=cls):
                if cls.__name__ not in lines:
                    lines[cls.__name__] = ""  # records may hold each other
                    fields = [f"{f.encode_name}{'' if f.required else '?'}: {spell(f.type)}" for f in node.fields]
                    lines[cls.__name__] = f"{cls.__name__} {node.tag} {node.array_like} {', '.join(fields)}"
                return str(cls.__name__)
            case inspect.EnumType(cls=cls):
                return "|".join(repr(member.value) for member in cls)
            case inspect.Type():
                parts = [spell(value) for name in node.__struct_fields__ if (value := getattr(node, name)) is not None]
                return f"{type(node).__name__}({', '.join(parts)})"
            case tuple() | list():
                return "+".join(spell(each) for each in node)
            case Enum():
                return node.name
            case _:
                return repr(node)

    for kind in kinds:
        spell(inspect.type_info(kind))
    return [lines[name] for name in sorted(lines)]


def protobuf_lines(names: tuple[str, ...]) -> list[str]:
    """One line for each field and enum value that can be met in messages of these names."""
    lines: dict[str, list[str]] = {}

    def visit(message: Any) -> None:
        if message is None or message.full_name in lines:
            return
        written = descriptor_pb2.DescriptorProto()
        message.CopyToProto(written)
        lines[message.full_name] = [
            f"{message.full_name} {f.number} {f.name} {f.type} {f.label} {f.type_name} {f.proto3_optional}"
            for f in sorted(written.field, key=lambda f: f.number)
        ]
        for field in message.fields:
            visit(field.message_type)
            if field.enum_type is not None:
                values = [f"{value.number}={value.name}" for value in field.enum_type.values]
                lines[field.enum_type.full_name] = [f"{field.enum_type.full_name} {' '.join(values)}"]

    for name in names:
        visit(worker_pb2.DESCRIPTOR.message_types_by_name[name])
    return [line for name in sorted(lines) for line in lines[name]]


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_definitions_are_those_of_the_wire_version() -> None:
    now = digest(record_lines(RECORDS) + protobuf_lines(STREAMED))
    assert now == WIRE_DIGEST, (
        f"a message between Segue's processes has changed: raise WIRE_VERSION (now {WIRE_VERSION}) and set WIRE_DIGEST "
        f"to {now!r} in segue/wire_version.py"
    )


def test_definitions_cover_what_is_said() -> None:
    """Down to the records and messages inside others."""
    text = "\n".join(record_lines(RECORDS) + protobuf_lines(STREAMED))
    for name in (
        "KvLayout",
        "Grant ",
        "LoadReport",
        "BlocksStored",
        "TokenLogprobs",
        "segue.v1.SamplingParams",
        "OUTCOME_",
    ):
        assert name in text


class Before(msgspec.Struct, array_like=True, tag="x"):
    pages: list[int]


@pytest.mark.parametrize(
    "fields",
    [
        {"pages": list[int], "first": int},
        {"pages": list[str]},
        {"blocks": list[int]},
        {"pages": list[int] | None},
    ],
)
def test_any_change_of_a_record_changes_the_digest(fields: dict[str, Any]) -> None:
    after = msgspec.defstruct("Before", list(fields.items()), array_like=True, tag="x")
    assert digest(record_lines((Before,))) != digest(record_lines((after,)))


def test_tag_and_shape_of_a_record_count() -> None:
    kinds = [
        msgspec.defstruct("Before", [("pages", list[int])], array_like=array_like, tag=tag)
        for array_like, tag in ((True, "x"), (True, "y"), (False, "x"))
    ]
    assert len({digest(record_lines((kind,))) for kind in kinds}) == 3
