"""One contract for every mover. A mover joins by adding a maker to MAKERS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvstore.connectors.base import MOVERS, MoveDone, Mover, MoverError, mover_class
from kvstore.connectors.process_identity import start_ticks, this_process
from kvstore.connectors.shared_memory import SharedMemoryMover, page_runs
from kvstore.connectors.shared_segment import SHM_DIR, OwnedSegment
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity
from segue.ids import InstanceRef

P, D = InstanceRef("p", 1), InstanceRef("d", 1)
PAGES, PAGE_BYTES = 8, 512


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
        self.source.register(D, this_process(), self.target.describe())
        self.target.register(P, this_process(), None)

    def wait(self) -> MoveDone:
        assert self.finished.acquire(timeout=30)
        (done,) = self.source.poll()
        return done


def shared_memory_ends() -> Ends:
    segment = OwnedSegment(f"seguetest-{os.getpid()}-{os.urandom(4).hex()}", PAGES, PAGE_BYTES)
    finished = threading.Semaphore(0)
    own = memoryview(bytearray(PAGES * PAGE_BYTES))
    source = SharedMemoryMover(own, PAGE_BYTES, on_done=finished.release)
    target = SharedMemoryMover(segment.pages, PAGE_BYTES, segment=segment)
    return Ends(source, target, own, segment.pages, finished)


MAKERS: dict[str, Callable[[], Ends]] = {"shared_memory": shared_memory_ends}


@pytest.fixture(params=sorted(MAKERS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = MAKERS[request.param]()
    yield made
    made.source.close()
    made.target.close()


def test_every_registered_mover_runs_this_contract() -> None:
    assert set(MOVERS) == set(MAKERS)


def test_pages_land_where_they_were_sent(ends: Ends) -> None:
    ends.connect()
    for page in range(PAGES):
        ends.fill(page, page + 1)
    ends.target.receive(P, [7, 0, 3])
    ends.source.send(1, D, [(1, 7), (2, 0), (6, 3)])
    assert ends.wait() == MoveDone(1, 3)
    assert [ends.at_target(page)[0] for page in range(PAGES)] == [3, 0, 0, 7, 0, 0, 0, 2]
    assert ends.at_target(7) == bytes([2]) * PAGE_BYTES


def test_every_op_ends_exactly_once_in_order(ends: Ends) -> None:
    ends.connect()
    for op in range(50):
        ends.source.send(op, D, [(op % PAGES, op % PAGES)])
    ended: list[int] = []
    while len(ended) < 50:
        assert ends.finished.acquire(timeout=30)
        ended += [done.op for done in ends.source.poll()]
    assert ended == list(range(50))
    assert ends.source.poll() == []


def test_send_to_an_unregistered_peer_ends_with_an_error(ends: Ends) -> None:
    ends.source.send(1, D, [(0, 0)])
    done = ends.wait()
    assert done.moved == 0 and done.error


def test_page_out_of_range_moves_nothing(ends: Ends) -> None:
    ends.connect()
    ends.fill(0, 9)
    ends.source.send(1, D, [(0, 0), (0, PAGES)])
    done = ends.wait()
    assert done.moved == 0 and done.error
    assert ends.at_target(0)[0] == 0


def test_lending_to_an_unregistered_peer_is_an_error(ends: Ends) -> None:
    with pytest.raises(MoverError):
        ends.target.receive(P, [0])


def test_memory_of_somebody_else_is_refused(ends: Ends) -> None:
    segment = ends.target.describe()
    assert segment is not None
    forged = msgspec.structs.replace(segment, nonce=bytes(len(segment.nonce)))
    with pytest.raises(MoverError, match="nonce"):
        ends.source.register(D, this_process(), forged)


def test_memory_that_is_not_there_is_refused(ends: Ends) -> None:
    segment = ends.target.describe()
    assert segment is not None
    with pytest.raises(MoverError, match="cannot be opened"):
        ends.source.register(D, this_process(), msgspec.structs.replace(segment, location="seguetest-nowhere"))


def test_other_page_size_is_refused(ends: Ends) -> None:
    segment = ends.target.describe()
    assert segment is not None
    with pytest.raises(MoverError):
        ends.source.register(D, this_process(), msgspec.structs.replace(segment, page_bytes=PAGE_BYTES * 2, pages=4))


def test_fence_proves_nothing_while_the_peer_lives(ends: Ends) -> None:
    ends.connect()
    assert not ends.target.fence(P)


def test_fence_proves_it_once_the_peer_is_gone(ends: Ends) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    ends.target.register(P, ProcessIdentity(this_process().boot_id, child.pid, ticks), None)
    assert not ends.target.fence(P)
    child.communicate(b"\n")
    assert ends.target.fence(P)


def test_reused_pid_is_not_the_peer(ends: Ends) -> None:
    mine = this_process()
    ends.target.register(P, msgspec.structs.replace(mine, start_ticks=mine.start_ticks - 1), None)
    assert ends.target.fence(P)


def test_close_is_idempotent_and_leaves_no_memory_behind(ends: Ends) -> None:
    segment = ends.target.describe()
    assert segment is not None
    path = SHM_DIR / segment.location
    assert path.exists()
    ends.target.close()
    ends.target.close()
    assert not path.exists()


def test_cancelled_op_still_ends() -> None:
    """The copy thread is held by a long first op, so that the second is cancelled before it begins."""
    ends = shared_memory_ends()
    ends.connect()
    ends.source.send(1, D, [(0, 0), (1, 2)] * 20_000)
    ends.source.send(2, D, [(0, 1)])
    ends.source.cancel(2)
    ended = {}
    while len(ended) < 2:
        assert ends.finished.acquire(timeout=60)
        ended.update({done.op: done for done in ends.source.poll()})
    assert ended[2] == MoveDone(2, 0, "cancelled")
    ends.source.close()
    ends.target.close()


def test_segment_that_does_not_fit_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        OwnedSegment(f"seguetest-{os.getpid()}-huge", 1 << 30, 1 << 20)
    assert not (SHM_DIR / f"seguetest-{os.getpid()}-huge").exists()


def test_unknown_mover_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="shared_memory"):
        mover_class("telepathy")
    assert mover_class("shared_memory") is SharedMemoryMover


def test_runs_join_only_neighbours_on_both_sides() -> None:
    assert page_runs([(1, 5), (2, 6), (3, 9), (4, 10), (7, 11)], 64) == [(1, 5, 2), (3, 9, 2), (7, 11, 1)]
    assert page_runs([(0, 0), (1, 1), (2, 2)], 2) == [(0, 0, 2), (2, 2, 1)]
