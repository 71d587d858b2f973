"""What the launcher asks of a way to run instances; `processes.py` and `ray_pool.py` are the two ways."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Death(msgspec.Struct, frozen=True):
    """A part of the cluster that ended although nobody asked it to."""

    name: str
    reason: str
    log_tail: str


class InstancePool(Protocol):
    """Started once, stopped once; a pool restarts nothing."""

    def start(self) -> None: ...

    def ready(self) -> set[str]:
        """Names of the instances that have registered with the Conductor."""

    def death(self) -> Death | None:
        """The first instance found dead, or None."""

    def stop(self) -> None:
        """End every instance: ask, wait, then kill. Safe after a failed `start`, and when called twice."""
