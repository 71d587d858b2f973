"""What the launcher asks of a way to run instances; `processes.py` and `ray_pool.py` are the two ways."""

from __future__ import annotations

from typing import Protocol

import msgspec

from segue.config import WorkerConfig


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

    def failure(self) -> Death | None:
        """What the pool itself has died of: nothing of it can be started again then."""

    def kill(self, name: str) -> None:
        """End the instance's process at once, whatever it does (or does not) do; then it is among the dead."""

    def restart(self, name: str) -> None:
        """Start a dead instance again in its slot, after what its last process left behind is removed."""

    def add(self, worker: WorkerConfig) -> None:
        """Start one more instance, in a slot of its own."""

    def retire(self, name: str) -> None:
        """Tell an instance to end what it runs and to leave; then it is among the dead."""

    def remove(self, name: str) -> None:
        """Forget a dead instance and its slot, after what its last process left behind is removed."""

    def pid(self, name: str) -> int | None:
        """Of the instance's present or last process; None before it has registered."""

    def stop(self) -> None:
        """End every instance: ask, wait, then kill. Safe after a failed `start`, and when called twice."""
