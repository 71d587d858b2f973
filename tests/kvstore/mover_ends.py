"""A source and a target on one mover, for the contract that every mover has to keep."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvstore.connectors.base import MoveDone, Mover
from kvstore.connectors.choice import ProbingMover
from kvstore.connectors.cuda_driver import CudaDriver
from kvstore.connectors.cuda_ipc import CudaIpcMover
from kvstore.connectors.device_memory import DeviceDriver, DevicePages, HostDriver
from kvstore.connectors.process_identity import this_process
from kvstore.connectors.shared_memory import SharedMemoryMover
from kvstore.connectors.shared_segment import OwnedSegment
from kvstore.connectors.tcp import TcpMover
from segue.ids import AttemptRef, InstanceRef

P, D = InstanceRef("p", 1), InstanceRef("d", 1)
ATTEMPT = AttemptRef("r", 1)
PAGES, PAGE_BYTES = 8, 512
WAIT_S = 30


@dataclass
class Ends:
    source: Mover
    target: Mover
    source_pages: memoryview
    target_pages: memoryview
    finished: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def fill(self, page: int, value: int) -> None:
        self.source_pages[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes([value]) * PAGE_BYTES

    def at_target(self, page: int) -> bytes:
        return bytes(self.target_pages[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def connect(self) -> None:
        self.target.register(P, this_process(), [])
        self.source.register(D, this_process(), self.target.describe())

    def lend_all(self) -> None:
        self.target.receive(P, ATTEMPT, range(PAGES))

    def wait(self) -> MoveDone:
        (done,) = self.wait_all(1)
        return done

    def wait_all(self, count: int) -> list[MoveDone]:
        done: list[MoveDone] = []
        while len(done) < count:
            assert self.finished.acquire(timeout=WAIT_S)
            done += self.source.poll()
        return done

    def close(self) -> None:
        self.source.close()
        self.target.close()


@dataclass(frozen=True)
class DevicePool:
    address: int
    driver: DeviceDriver
    memory: object
    """Keeps the memory alive."""


def device_pool(size: int) -> DevicePool:
    if torch.cuda.is_available():
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        return DevicePool(tensor.data_ptr(), CudaDriver(tensor.data_ptr()), tensor)
    buffer = ctypes.create_string_buffer(size)
    return DevicePool(ctypes.addressof(buffer), HostDriver(), buffer)


@dataclass
class DeviceEnds(Ends):
    """Reads and writes pages through the driver."""

    pools: list[DevicePool] = field(default_factory=list)

    def fill(self, page: int, value: int) -> None:
        pool = self.pools[0]
        pool.driver.write(pool.address + page * PAGE_BYTES, bytes([value]) * PAGE_BYTES)

    def at_target(self, page: int) -> bytes:
        pool = self.pools[1]
        return pool.driver.read(pool.address + page * PAGE_BYTES, PAGE_BYTES)


def own_segment() -> OwnedSegment:
    return OwnedSegment(f"seguetest-{os.getpid()}-{os.urandom(4).hex()}", PAGES, PAGE_BYTES)


def shared_memory_ends() -> Ends:
    segment, finished = own_segment(), threading.Semaphore(0)
    own = memoryview(bytearray(PAGES * PAGE_BYTES))
    source = SharedMemoryMover(own, PAGE_BYTES, on_done=finished.release)
    target = SharedMemoryMover(segment.pages, PAGE_BYTES, segment=segment)
    return Ends(source, target, own, segment.pages, finished)


def tcp_ends(*, stall_s: float = WAIT_S) -> Ends:
    finished = threading.Semaphore(0)
    own, theirs = (memoryview(bytearray(PAGES * PAGE_BYTES)) for _ in range(2))
    source = TcpMover(P, own, PAGE_BYTES, stall_s=stall_s, on_done=finished.release)
    target = TcpMover(D, theirs, PAGE_BYTES, listen_host="127.0.0.1", stall_s=stall_s)
    return Ends(source, target, own, theirs, finished)


def probing_ends() -> Ends:
    segment, finished = own_segment(), threading.Semaphore(0)
    own = memoryview(bytearray(PAGES * PAGE_BYTES))
    source = ProbingMover(
        SharedMemoryMover(own, PAGE_BYTES, on_done=finished.release),
        TcpMover(P, own, PAGE_BYTES, on_done=finished.release),
    )
    target = ProbingMover(
        SharedMemoryMover(segment.pages, PAGE_BYTES, segment=segment),
        TcpMover(D, segment.pages, PAGE_BYTES, listen_host="127.0.0.1"),
    )
    return Ends(source, target, own, segment.pages, finished)


def device_ends() -> Ends:
    """On a GPU by its driver, elsewhere on plain memory; both ends in this process."""
    finished = threading.Semaphore(0)
    pools = [device_pool(PAGES * PAGE_BYTES + DevicePages.TRAILER_BYTES) for _ in range(2)]
    own, theirs = (DevicePages(pool.address, PAGES, PAGE_BYTES) for pool in pools)
    driver = pools[0].driver
    source = CudaIpcMover(own, driver, on_done=finished.release)
    target = CudaIpcMover(theirs, driver, is_target=True)
    return DeviceEnds(source, target, memoryview(b""), memoryview(b""), finished, pools)


MAKERS: dict[str, Callable[[], Ends]] = {
    "auto": probing_ends,
    "cuda_ipc": device_ends,
    "shared_memory": shared_memory_ends,
    "tcp": tcp_ends,
}
