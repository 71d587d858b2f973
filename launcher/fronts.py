"""The Conductor + gateway processes of one cluster: started together, watched, started again at their addresses.

One alone is the cluster's end when it dies. Of several each is as good as any other: a dead one comes back at the same
ports, its streams end with UNAVAILABLE, and the others' go on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from launcher.instance_pool import Death
from launcher.processes import ChildProcess, stop_children, thread_environment
from launcher.supervision import RestartLimits, Supervisor
from segue.config import FrontConfig
from segue.manifest import Role

READY_S_MAX = 1.0
"""For a front of this machine to say whether it is ready; the watch over the others waits meanwhile."""


class FrontAddress(msgspec.Struct, frozen=True):
    """`host:port` of both servers of one front, as workers and clients reach them."""

    grpc: str
    http: str


class Fronts:
    """`start`, then `addresses` until they are known, then `tend` again and again, then `stop`."""

    def __init__(
        self,
        configs: Sequence[FrontConfig],
        logs: Path,
        say: Callable[[str], None],
        limits: RestartLimits | None = None,
    ) -> None:
        self._configs = {f"front-{number}" if len(configs) > 1 else "front": c for number, c in enumerate(configs)}
        self._logs = logs
        self._say = say
        # A front that is left can serve, as an instance that does everything can: the rule is the same.
        self._supervisor = Supervisor(dict.fromkeys(self._configs, Role.AGGREGATED), limits)
        self._children: dict[str, ChildProcess] = {}
        self._unannounced: set[str] = set()
        """Started again, and not ready for requests yet."""

    def start(self) -> None:
        for name in self._configs:
            self._start_child(name)

    def addresses(self) -> list[FrontAddress] | None:
        """None until all of them serve."""
        ready = [child.ready() for child in self._children.values()]
        if not ready or None in ready:
            return None
        found = [msgspec.convert(facts, FrontAddress) for facts in ready]
        for name, address in zip(self._configs, found, strict=True):
            self._configs[name] = _at(self._configs[name], address)
        self._supervisor.ready(self._configs, _now_us())
        return found

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def first_death(self) -> Death | None:
        """While they start, any death is one too many."""
        return next((death for child in self._children.values() if (death := child.death())), None)

    def tend(self) -> Death | None:
        """The death that leaves no front."""
        now_us = _now_us()
        deaths = {name: death for name, child in self._children.items() if (death := child.death())}
        for name in self._supervisor.awaited_deaths(deaths):
            if len(self._configs) == 1 or not self._mourn(deaths[name], now_us):
                return deaths[name]
        for name in self._supervisor.take_due(now_us):
            self._start_child(name)
        serving = [name for name, child in self._children.items() if name not in deaths and child.ready() is not None]
        for name in self._supervisor.ready(serving, now_us):
            self._say(f"{name} is up again; it waits for instances")
            self._unannounced.add(name)
        for name in sorted(self._unannounced.intersection(serving)):
            if is_ready(msgspec.convert(self._children[name].ready(), FrontAddress)):
                self._unannounced.remove(name)
                self._say(f"{name} serves again")
        return None

    def announce_end(self) -> None:
        """The first of two SIGTERM: from now on they refuse what is new, and say why."""
        for child in self._children.values():
            child.send(signal.SIGTERM)

    def stop(self) -> None:
        stop_children(list(self._children.values()))

    def _start_child(self, name: str) -> None:
        environment = thread_environment(1)
        config = self._configs[name]
        self._children[name] = ChildProcess(name, "conductor.app", config, logs=self._logs, environment=environment)

    def _mourn(self, death: Death, now_us: int) -> bool:
        """Whether one is left, or will be."""
        wait_us = self._supervisor.died(death.name, now_us)
        what = "it is given up" if wait_us is None else f"it starts again in {wait_us / 1e6:g} s"
        self._say(f"{death.name} {death.reason}: {what}")
        return self._supervisor.can_serve


def is_ready(front: FrontAddress) -> bool:
    """Whether it would take a request now."""
    try:
        return httpx.get(f"http://{front.http}/ready", trust_env=False, timeout=READY_S_MAX).is_success
    except httpx.HTTPError:
        return False


def _at(config: FrontConfig, address: FrontAddress) -> FrontConfig:
    """The same front where it was found, so that it comes back there."""
    ports = {"grpc_port": address.grpc, "http_port": address.http}
    return msgspec.structs.replace(config, **{name: int(at.rpartition(":")[2]) for name, at in ports.items()})


def _now_us() -> int:
    return time.monotonic_ns() // 1000
