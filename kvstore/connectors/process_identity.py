"""Whether a peer's process still exists: the proof that it can write nothing more.

A pid alone proves nothing: it may have been given to another process, and it means something else in another pid
namespace (a pod's first process is 1 in every pod). (boot and pid namespace, pid, start time) names a process for
good, and a pidfd opened while that triple was true turns readable exactly when this process has ended.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from segue.handoff_messages import ProcessIdentity

_START_TIME_FIELD = 22
"""Of /proc/PID/stat, counted from 1; see proc_pid_stat(5)."""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_space() -> str:
    """Where this process's pids mean something: the boot, and the pid namespace within it."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks after boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[_START_TIME_FIELD - 3])


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    ticks = start_ticks(pid)
    assert ticks is not None
    return ProcessIdentity(pid_space(), pid, ticks)


class ProcessWatch:
    """Watches one process of this machine. `fileno` turns readable when it has ended.

    A process of another boot or pid namespace cannot be watched: then `is_local` is False and nothing is ever proven.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        self.process = process
        self.is_local = process.pid_space == pid_space()
        self._pidfd: int | None = None
        self._gone = False
        if not self.is_local:
            return
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._gone = True
            return
        # Read after the pidfd was opened: from here on the descriptor cannot mean another process.
        if start_ticks(process.pid) == process.start_ticks:
            self._pidfd = pidfd
        else:
            os.close(pidfd)
            self._gone = True

    def fileno(self) -> int | None:
        return self._pidfd

    def is_gone(self) -> bool:
        if not self._gone and self._pidfd is not None:
            readable, _, _ = select.select([self._pidfd], [], [], 0)
            self._gone = bool(readable)
        return self._gone

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
