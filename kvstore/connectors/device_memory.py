"""What a mover needs of a GPU, as a port: `cuda_driver` is the real one, `HostDriver` one of plain memory.

Addresses are integers. Every call may be made by any thread; a failing one raises DeviceError with the driver's words.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.errors import SegueError

HANDLE_BYTES = 64


class DeviceError(SegueError):
    """The driver refused; the message names the call."""


@dataclass(frozen=True, slots=True)
class DevicePages:
    """A page pool in device memory, one run of bytes, with TRAILER_BYTES behind it that a target marks."""

    address: int
    pages: int
    page_bytes: int

    TRAILER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Exported:
    """An allocation as another process may open it; the memory meant stands `offset` bytes into it."""

    handle: bytes
    offset: int
    device_uuid: str


class DeviceDriver(Protocol):
    def export(self, address: int) -> Exported: ...

    def open(self, exported: Exported) -> int:
        """Address of the exported memory in this process, until `close`. DeviceError also when its GPU is not here."""

    def close(self, exported: Exported, address: int) -> None: ...

    def read(self, address: int, size: int) -> bytes: ...

    def write(self, address: int, content: bytes) -> None: ...

    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(source address, target address, bytes) each; returns when every byte has landed."""


class HostDriver:
    """Plain memory of this process behind the same port: for tests and machines without a GPU."""

    def __init__(self) -> None:
        self._exported: dict[bytes, int] = {}

    def export(self, address: int) -> Exported:
        handle = secrets.token_bytes(HANDLE_BYTES)
        self._exported[handle] = address
        return Exported(handle, 0, "host")

    def open(self, exported: Exported) -> int:
        if exported.handle not in self._exported:
            raise DeviceError("open: no such allocation")
        return self._exported[exported.handle] + exported.offset

    def close(self, exported: Exported, address: int) -> None:
        pass

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
        for source, target, size in runs:
            ctypes.memmove(target, source, size)
