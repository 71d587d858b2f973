"""Keeping the instances of a running cluster alive: starts the dead again, replaces the hung, says what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from launcher.instance_pool import Death, InstancePool
from launcher.rpc_client import ClientError, SegueClient
from launcher.supervision import Absences, RestartLimits, Supervisor
from segue.manifest import Role

LOOK_US = 1_000_000
"""The Conductor is asked for its members this often."""


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class Tender:
    """`tend` is one round of the watch over `pool`; `front` is the gRPC address of the Conductor."""

    def __init__(
        self,
        pool: InstancePool,
        roles: Mapping[str, Role],
        front: str,
        say: Callable[[str], None],
        limits: RestartLimits | None = None,
    ) -> None:
        self._pool = pool
        self._supervisor = Supervisor(roles, limits)
        self._absences = Absences()
        self._client = SegueClient(front)
        self._say = say
        self._look_us = 0
        self._supervisor.ready(pool.ready(), monotonic_us())
        self.restarts = 0

    def tend(self) -> Death | None:
        """The death that leaves nobody to serve, or None while the cluster can go on."""
        now_us = monotonic_us()
        deaths = {death.name: death for death in self._pool.deaths()}
        for name in self._supervisor.awaited_deaths(deaths):
            self._mourn(deaths[name], now_us)
            if not self._supervisor.can_serve:
                return deaths[name]
        for name in self._supervisor.take_due(now_us):
            self._pool.restart(name)
            self.restarts += 1
        ready = self._pool.ready() - set(deaths)
        for name in sorted(self._supervisor.ready(ready, now_us)):
            self._say(f"{name} is ready")
        if now_us >= self._look_us:
            self._look_us = now_us + LOOK_US
            self._replace_hung(ready, now_us)
        return None

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    def _mourn(self, death: Death, now_us: int) -> None:
        wait_us = self._supervisor.died(death.name, now_us)
        what = "it is given up" if wait_us is None else f"it starts again in {wait_us / 1e6:g} s"
        log = f"; the end of its log:\n{death.log_tail}" if wait_us is None and death.log_tail else ""
        self._say(f"{death.name} {death.reason}: {what}{log}")

    def _replace_hung(self, ready: set[str], now_us: int) -> None:
        try:
            members = [instance.name for instance in self._client.cluster().instances]
        except ClientError:
            self._absences.forget()
            return
        for name in self._absences.observe(ready, members, now_us):
            self._say(f"{name} runs, but the Conductor does not hear it: it is killed")
            self._pool.kill(name)
