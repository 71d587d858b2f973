"""The private folder of one running cluster, and proof that nothing of it is left afterwards.

A cluster is named `segue-<8 hex digits>`. Its folder (sockets, logs, Ray's session) and its shared-memory segments
carry that name, so whoever cleans up needs nothing else. The file `owner` inside names the launcher's process; what a
killed launcher left behind is swept by the next one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from launcher.host_facts import SHARED_MEMORY
from segue.config import WorkerConfig

NAME_PREFIX = "segue-"
OWNER_FILE = "owner"

BASE_CHARS_MAX = 24
"""Unix socket paths hold 107 bytes and Ray appends about 75 to the folder; a longer temp dir is passed over."""


def base_dir() -> Path:
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) <= BASE_CHARS_MAX else Path("/tmp")


class RuntimeDir:
    """Created on construction, mode 0700; `remove` deletes the folder and the cluster's shared memory."""

    def __init__(self) -> None:
        self.cluster = NAME_PREFIX + secrets.token_hex(4)
        self.path = base_dir() / self.cluster
        self.path.mkdir(mode=0o700)
        self.logs = self.path / "logs"
        self.logs.mkdir()
        (self.path / OWNER_FILE).write_text(_mark(os.getpid()))

    def remove(self) -> None:
        remove_cluster(self.path)


def remove_cluster(path: Path) -> None:
    """Delete a cluster's folder and every shared-memory segment named after it."""
    if SHARED_MEMORY.is_dir():
        for segment in SHARED_MEMORY.glob(path.name + "*"):
            segment.unlink(missing_ok=True)
    _empty(path)
    if path.is_dir() and [child.name for child in path.iterdir()] == [OWNER_FILE]:
        (path / OWNER_FILE).unlink()
        path.rmdir()


def _empty(path: Path) -> None:
    """Delete all but the mark of the owner: without it, what a dying process still writes would never be swept."""
    if not path.is_dir():
        return
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        elif child.name != OWNER_FILE:
            child.unlink(missing_ok=True)


def clear_slot(worker: WorkerConfig) -> None:
    """Delete the page pool and the sockets of an instance whose process is gone: a pool may be most of the memory."""
    if SHARED_MEMORY.is_dir():
        for segment in SHARED_MEMORY.glob(f"{worker.shm_prefix}-{worker.name}-*"):
            segment.unlink(missing_ok=True)
    if worker.runtime_dir:
        for socket in Path(worker.runtime_dir).glob(f"{worker.uuid[:12]}-*"):
            socket.unlink(missing_ok=True)


def stale_clusters() -> list[Path]:
    """Folders of this user whose launcher is gone."""
    return [path for path in sorted(base_dir().glob(NAME_PREFIX + "*")) if _is_stale(path)]


def sweep_stale_clusters() -> list[Path]:
    """Remove what killed launchers left behind; return what was removed."""
    stale = stale_clusters()
    for path in stale:
        remove_cluster(path)
    return stale


def _is_stale(path: Path) -> bool:
    owner = path / OWNER_FILE
    if not owner.is_file() or owner.stat().st_uid != os.getuid():
        return False
    mark = owner.read_text().split()
    if len(mark) != 4 or not mark[0].isdigit():
        return False
    if mark[2] == _boot_id() and mark[3] != _pid_namespace():
        return False  # of another container, whose processes cannot be seen from here
    try:
        return _mark(int(mark[0])).split() != mark
    except FileNotFoundError:
        return True


def _mark(pid: int) -> str:
    """Pid, start time, boot and pid namespace: a pid alone may have been given to another process. The start time is in
    clock ticks since the boot (proc_pid_stat(5), field 22): as a time of day it would move when the clock is set.

    Raises:
        FileNotFoundError: there is no such process.
    """
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{pid} {after_name[19]} {_boot_id()} {_pid_namespace()}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
