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
    """Started once, stopped once; whether and when an instance is started again is not a pool's decision."""

    def start(self) -> None: ...

    def ready(self) -> set[str]:
        """Names of the instances whose present process has registered with the Conductor."""

    def deaths(self) -> list[Death]:
        """Instances without a living process."""

    def kill(self, name: str) -> None:
        """End the instance's process at once, whatever it does (or does not) do; then it is among the dead."""

    def restart(self, name: str) -> None:
        """Start a dead instance again in its slot, after what its last process left behind is removed."""

    def stop(self) -> None:
        """End every instance: ask, wait, then kill. Safe after a failed `start`, and when called twice."""
