"""CUDA's driver API by ctypes: inter-process handles and copies between allocations of one GPU or of peers.

Torch could rebuild a tensor from a handle, but only through pickled storages; the driver's own calls need nothing of
it but an address. Work runs in the primary context, the one torch uses, on a stream of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from kvstore.connectors.device_memory import HANDLE_BYTES, DeviceError, Exported

_ATTRIBUTE_DEVICE_ORDINAL = 9
_STREAM_NON_BLOCKING = 1
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_Address = ctypes.c_uint64


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class CudaDriver:
    """For pages on one device, that of `address`. DeviceError where there is no driver or the address is not CUDA's."""

    def __init__(self, address: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"CUDA's driver: {error}") from error
        self._call("cuInit", 0)
        self._context: ctypes.c_void_p | None = None
        ordinal = ctypes.c_int()
        attribute = _ATTRIBUTE_DEVICE_ORDINAL
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), attribute, _Address(address))
        self._device = self._device_of(ordinal.value)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        self._local = threading.local()

    def export(self, address: int) -> Exported:
        base, size, handle = _Address(), ctypes.c_size_t(), _IpcHandle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _Address(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Exported(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), address - base.value, self._uuid())

    def open(self, exported: Exported) -> int:
        uuids = self._visible_uuids()
        if exported.device_uuid not in uuids:
            raise DeviceError(f"GPU {exported.device_uuid} is not among this process's: {', '.join(uuids)}")
        handle, base = _IpcHandle(), _Address()
        ctypes.memmove(ctypes.byref(handle), exported.handle, HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _IPC_LAZY_ENABLE_PEER_ACCESS)
        return base.value + exported.offset

    def close(self, exported: Exported, address: int) -> None:
        self._call("cuIpcCloseMemHandle", _Address(address - exported.offset))

    def read(self, address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", content, _Address(address), ctypes.c_size_t(size))
        return content.raw

    def write(self, address: int, content: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", _Address(address), content, ctypes.c_size_t(len(content)))

    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
        stream = self._stream()
        for source, target, size in runs:
            self._call("cuMemcpyDtoDAsync_v2", _Address(target), _Address(source), ctypes.c_size_t(size), stream)
        self._call("cuStreamSynchronize", stream)

    def _call(self, name: str, *arguments: Any) -> None:
        """In the pages' context, which every thread has to be told of once."""
        if getattr(self, "_context", None) is not None and not getattr(self._local, "is_current", False):
            self._local.is_current = True
            self._call("cuCtxSetCurrent", self._context)
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise DeviceError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")

    def _stream(self) -> ctypes.c_void_p:
        """Of the calling thread; work in it never waits for the default stream."""
        stream: ctypes.c_void_p | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
            self._local.stream = stream
        return stream

    def _device_of(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _uuid(self, device: ctypes.c_int | None = None) -> str:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device if device is None else device)
        return bytes(uuid.bytes).hex()

    def _visible_uuids(self) -> list[str]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._uuid(self._device_of(ordinal)) for ordinal in range(count.value)]
