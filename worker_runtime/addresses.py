"""Where the sockets of one instance listen."""

from __future__ import annotations

from segue.config import WorkerConfig
from segue.ids import InstanceRef

SUN_PATH_BYTES_MAX = 100
"""unix(7) allows 107; ZeroMQ needs a few."""


def listen_address(config: WorkerConfig, ref: InstanceRef, what: str) -> str:
    """A Unix socket in the cluster's private directory; TCP where there is none, or its path is too long for one."""
    path = f"{config.runtime_dir}/{ref.uuid[:12]}-{ref.incarnation % 10**9}-{what}"
    if config.runtime_dir and len(path.encode()) <= SUN_PATH_BYTES_MAX:
        return f"ipc://{path}"
    return f"tcp://{config.bind_host}:*"
