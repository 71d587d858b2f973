"""The header of a GGUF file (versions 2 and 3, little-endian): metadata and tensor directory.

Layout: "GGUF", u32 version, u64 tensors, u64 metadata entries; entries of (string key, u32 type, value); tensor entries
of (string name, u32 dims, u64 size each, u32 type, u64 offset); padding to `general.alignment`; tensor data. A string
is a u64 length and UTF-8 bytes; an array is a u32 element type, a u64 length and its elements.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from segue.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    """[out, in]: slowest dimension first."""
    kind: gguf.GGMLQuantizationType
    offset: int
    """Bytes from the start of the tensor data."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int


class _Cursor:
    """Reads values one after another; running off the end raises struct.error."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        if length > len(self.data) - self.position:
            raise ValueError("a string runs past the end")
        start, self.position = self.position, self.position + length
        return bytes(self.data[start : self.position]).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(length)]
        values = list(struct.unpack_from(f"<{length}{_SCALARS[kind]}", self.data, self.position))
        self.position += length * struct.calcsize("<" + _SCALARS[kind])
        return values


def parse_header(data: npt.NDArray[np.uint8], source: str) -> GgufHeader:
    """Parse the start of a file; ConfigError names `source` when it is not GGUF, cut short, or of an unknown type."""
    cursor = _Cursor(memoryview(data.data))
    try:
        if bytes(data[:4]) != b"GGUF":
            raise ValueError("the magic bytes are not GGUF")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; known: 2, 3")
        tensor_count, entry_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(entry_count):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = dict(_tensor(cursor) for _ in range(tensor_count))
    except (struct.error, ValueError, KeyError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file: {error}") from error
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    data_start = -(-cursor.position // alignment) * alignment
    _check_extent(tensors, data_start, len(data), source)
    return GgufHeader(metadata, tensors, data_start)


def _tensor(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.text()
    sizes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    kind = gguf.GGMLQuantizationType(cursor.scalar("I"))
    return name, TensorInfo(tuple(reversed(sizes)), kind, cursor.scalar("Q"))


def _check_extent(tensors: dict[str, TensorInfo], data_start: int, size: int, source: str) -> None:
    for name, info in tensors.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
        length = int(np.prod(info.shape, dtype=np.int64)) // block * block_bytes
        if data_start + info.offset + length > size:
            raise ConfigError(f"{source}: cut short: tensor {name} ends past the end of the file")
