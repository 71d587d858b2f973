"""`python -m launcher.child PARENT_PID MODULE`: run MODULE as __main__ in a process that ends when the launcher does.

The kernel sends SIGTERM when the parent dies, however it dies, so the child still cleans up after itself. Set here
instead of between fork and exec, where Python code may deadlock on another thread's lock.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGTERM at the parent's death; exit at once when it has already happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        sys.exit(0)


def main() -> None:
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
