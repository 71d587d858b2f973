"""What is particular to shared memory: fences by process, names in /dev/shm, runs of pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from mover_ends import ATTEMPT, Ends, P, shared_memory_ends

from kvstore.connectors.process_identity import start_ticks, this_process
from kvstore.connectors.shared_memory import page_runs
from kvstore.connectors.shared_segment import SHM_DIR, OwnedSegment
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = shared_memory_ends()
    yield made
    made.close()


def test_fence_proves_nothing_while_the_peer_lives(ends: Ends) -> None:
    ends.connect()
    assert not ends.target.fence(P)
    assert not ends.target.fence(P, ATTEMPT)


def test_fence_proves_it_once_the_peer_is_gone(ends: Ends) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    ends.target.register(P, ProcessIdentity(this_process().pid_space, child.pid, ticks), [])
    assert not ends.target.fence(P)
    child.communicate(b"\n")
    assert ends.target.fence(P)


def test_reused_pid_is_not_the_peer(ends: Ends) -> None:
    mine = this_process()
    ends.target.register(P, msgspec.structs.replace(mine, start_ticks=mine.start_ticks - 1), [])
    assert ends.target.fence(P)


def test_close_leaves_no_memory_behind(ends: Ends) -> None:
    (offer,) = ends.target.describe()
    path = SHM_DIR / offer.location
    assert path.exists()
    ends.target.close()
    assert not path.exists()


def test_segment_that_does_not_fit_is_a_config_error() -> None:
    name = f"seguetest-{os.getpid()}-huge"
    with pytest.raises(ConfigError):
        OwnedSegment(name, 1 << 30, 1 << 20)
    assert not (SHM_DIR / name).exists()


def test_runs_join_only_neighbours_on_both_sides() -> None:
    assert page_runs([(1, 5), (2, 6), (3, 9), (4, 10), (7, 11)], 64) == [(1, 5, 2), (3, 9, 2), (7, 11, 1)]
    assert page_runs([(0, 0), (1, 1), (2, 2)], 2) == [(0, 0, 2), (2, 2, 1)]
