"""What is particular to pages in device memory: how they are described, opened and closed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch
from mover_ends import ATTEMPT, PAGE_BYTES, PAGES, D, P, device_ends, device_pool

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.choice import make_mover
from kvstore.connectors.cuda_ipc import CudaIpcMover, location_of, read_location
from kvstore.connectors.device_memory import HANDLE_BYTES, DevicePages, Exported, HostDriver
from kvstore.connectors.process_identity import pid_space, start_ticks, this_process
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity

EXPORTED = Exported(bytes(range(HANDLE_BYTES)), 512, "ab" * 16)


class CountingDriver(HostDriver):
    """Says how many allocations are open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def open(self, exported: Exported) -> int:
        address = super().open(exported)
        self.opened += 1
        return address

    def close(self, exported: Exported, address: int) -> None:
        self.opened -= 1


def parent_process() -> ProcessIdentity:
    ticks = start_ticks(os.getppid())
    assert ticks is not None
    return ProcessIdentity(pid_space(), os.getppid(), ticks)


def test_a_location_is_read_as_it_was_written() -> None:
    assert read_location(location_of(EXPORTED, 77)) == (EXPORTED, 77)


@pytest.mark.parametrize("text", ["", "2:00:0:x:0", "1:00:0:x:0", "1", "1:zz:0:x:0", location_of(EXPORTED, 1) + ":9"])
def test_another_location_is_refused(text: str) -> None:
    with pytest.raises(MoverError, match="device memory"):
        read_location(text)


def test_a_mark_that_is_not_behind_the_pages_is_refused() -> None:
    ends = device_ends()
    ends.target.register(P, this_process(), [])
    (offer,) = ends.target.describe()
    with pytest.raises(MoverError, match="mark"):
        ends.source.register(D, this_process(), [msgspec.structs.replace(offer, nonce_offset=0)])
    ends.close()


def test_memory_of_a_peer_is_open_until_it_is_forgotten_or_met_again() -> None:
    driver, pool = CountingDriver(), device_pool(PAGES * PAGE_BYTES + DevicePages.TRAILER_BYTES)
    if torch.cuda.is_available():
        pytest.skip("plain memory only")
    target = CudaIpcMover(DevicePages(pool.address, PAGES, PAGE_BYTES), driver, is_target=True)
    source = CudaIpcMover(DevicePages(pool.address, PAGES, PAGE_BYTES), driver)
    for _ in range(2):
        source.register(D, parent_process(), target.describe())
        assert driver.opened == 1
    forged = [msgspec.structs.replace(offer, nonce=bytes(32)) for offer in target.describe()]
    with pytest.raises(MoverError, match="nonce"):
        source.register(D, parent_process(), forged)
    assert driver.opened == 0
    source.register(D, parent_process(), target.describe())
    source.close()
    assert driver.opened == 0
    target.close()


def test_pages_of_a_gpu_go_by_no_other_connector() -> None:
    pages = DevicePages(0, PAGES, PAGE_BYTES)
    for connector in ("tcp", "shared_memory"):
        with pytest.raises(ConfigError, match="cuda_ipc"):
            make_mover(
                connector,
                P,
                memoryview(b""),
                PAGE_BYTES,
                segment=None,
                listen_host=None,
                on_done=int,
                device_pages=pages,
            )


def test_pages_in_host_memory_do_not_go_by_cuda_ipc() -> None:
    with pytest.raises(ConfigError, match="CPU"):
        make_mover("cuda_ipc", P, memoryview(b""), PAGE_BYTES, segment=None, listen_host=None, on_done=int)


TARGET_PROCESS = """
    import sys
    import msgspec, torch
    from kvstore.connectors.cuda_driver import CudaDriver
    from kvstore.connectors.cuda_ipc import CudaIpcMover
    from kvstore.connectors.device_memory import DevicePages
    from kvstore.connectors.process_identity import this_process

    pages, page_bytes = 64, 1 << 20
    before = torch.zeros(300, device="cuda")  # the pool need not stand first in its allocation
    pool = torch.zeros(pages * page_bytes + DevicePages.TRAILER_BYTES, dtype=torch.uint8, device="cuda")
    mover = CudaIpcMover(DevicePages(pool.data_ptr(), pages, page_bytes), CudaDriver(pool.data_ptr()), is_target=True)
    sys.stdout.buffer.write(msgspec.json.encode([this_process(), mover.describe()]) + b"\\n")
    sys.stdout.flush()
    sys.stdin.readline()
    print([int(value) for value in pool[: pages * page_bytes].view(pages, -1).float().mean(1)])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pages_land_in_another_process_and_its_end_is_the_fence(tmp_path: Path) -> None:
    from kvstore.connectors.cuda_driver import CudaDriver
    from segue.handoff_messages import SegmentDescriptor

    script = tmp_path / "target.py"
    script.write_text(textwrap.dedent(TARGET_PROCESS))
    target = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert target.stdin is not None and target.stdout is not None
    described = msgspec.json.decode(target.stdout.readline(), type=tuple[ProcessIdentity, list[SegmentDescriptor]])
    page_bytes = described[1][0].page_bytes
    pool = torch.arange(64, dtype=torch.uint8, device="cuda")[:, None].repeat(1, page_bytes)
    torch.cuda.synchronize()
    source = CudaIpcMover(DevicePages(pool.data_ptr(), 64, page_bytes), CudaDriver(pool.data_ptr()))
    source.register(D, *described)
    source.send(1, D, ATTEMPT, [(page, 63 - page) for page in range(1, 64)])
    done: list[MoveDone] = []
    while not done:
        done = source.poll()
    assert done == [MoveDone(1, 63)]
    assert not source.fence(D)
    out, _ = target.communicate(b"\n", timeout=60)
    assert out.decode().strip() == str([63 - page if page < 63 else 0 for page in range(64)])
    assert source.fence(D)
    source.close()
