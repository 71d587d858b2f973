"""Whose death may be concluded from a pid, and whose may not."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from kvstore.connectors.process_identity import ProcessWatch, start_ticks, this_process


def test_a_living_process_of_another_pid_namespace_is_never_taken_for_gone() -> None:
    foreign = msgspec.structs.replace(this_process(), pid_space="this boot/pid:[1]", pid=2**22 - 1)
    watch = ProcessWatch(foreign)
    assert (watch.is_local, watch.is_gone()) == (False, False)


def test_a_process_that_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    watch = ProcessWatch(msgspec.structs.replace(this_process(), pid=child.pid, start_ticks=ticks))
    assert not watch.is_gone()
    child.kill()
    child.communicate()
    assert watch.is_gone()
    watch.close()


def test_a_pid_given_to_a_later_process_means_that_the_first_is_gone() -> None:
    mine = this_process()
    assert ProcessWatch(msgspec.structs.replace(mine, start_ticks=mine.start_ticks - 1)).is_gone()
