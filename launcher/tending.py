"""Keeping the instances of a running cluster alive and as many as wanted: starts the dead again, replaces the hung,
starts and retires what `segue scale` asks for, and says what happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from launcher.cluster_plan import plan_another, shared_memory_refusal
from launcher.host_facts import shared_memory_free_bytes
from launcher.instance_pool import Death, InstancePool
from launcher.rpc_client import ClientError, SegueClient
from launcher.rpc_pools import PoolLinks
from launcher.scaling import Action, Answer, Forget, Retire, Scaling, Start
from launcher.supervision import Absences, RestartLimits, Supervisor
from segue.config import WorkerConfig
from segue.manifest import Role
from segue.pool_messages import InstanceState, ScaleOrder, ScaleRefused

LOOK_US = 1_000_000
"""The Conductor is asked for its members this often."""


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class Tender:
    """`tend` is one round of the watch over `pool`, which was started with `workers`; `fronts` are the gRPC
    addresses of its Conductors."""

    def __init__(
        self,
        pool: InstancePool,
        workers: Sequence[WorkerConfig],
        fronts: Sequence[str],
        say: Callable[[str], None],
        limits: RestartLimits | None = None,
    ) -> None:
        roles = {worker.name: worker.role for worker in workers}
        self._pool = pool
        self._workers = {worker.name: worker for worker in workers}
        self._templates = {worker.role: worker for worker in reversed(workers)}
        self._supervisor = Supervisor(roles, limits)
        self._scaling = Scaling(roles)
        self._absences = Absences()
        self._clients = [SegueClient(front) for front in fronts]
        self._link = PoolLinks(fronts)
        self._say = say
        self._look_us = 0
        self.restarts = 0
        self._greet(pool.ready(), monotonic_us(), quietly=True)

    def tend(self) -> Death | None:
        """The death that leaves nobody to serve, or None while the cluster can go on."""
        if (failure := self._pool.failure()) is not None:
            return failure
        now_us = monotonic_us()
        for order in self._link.orders():
            self._carry_out(self._take(order), now_us)
        deaths = {death.name: death for death in self._pool.deaths()}
        for name in self._supervisor.awaited_deaths(deaths):
            self._mourn(deaths[name], now_us)
            if not self._supervisor.can_serve:
                return deaths[name]
        self._see_off(self._supervisor.retired(deaths), now_us)
        for name in self._supervisor.take_due(now_us):
            self._pool.restart(name)
            self.restarts += 1
        ready = self._pool.ready() - set(deaths)
        self._greet(ready, now_us)
        if now_us >= self._look_us:
            self._look_us = now_us + LOOK_US
            self._replace_hung(ready, now_us)
        return None

    def close(self) -> None:
        self._link.close()
        for client in self._clients:
            client.__exit__(None, None, None)

    # -- wanted sizes

    def _take(self, order: ScaleOrder) -> list[Action]:
        refusal = self._room_refusal(order)
        return [Answer(order.op, refusal)] if refusal is not None else self._scaling.take(order)

    def _room_refusal(self, order: ScaleOrder) -> ScaleRefused | None:
        """Memory is the one thing that is looked up: what can be refused by counting alone, `Scaling` refuses."""
        template = self._templates.get(Role(order.pool)) if order.pool in list(Role) else None
        if template is None:
            return None
        more = order.instances - len(self._scaling.members(template.role))
        reason = shared_memory_refusal(template, more, shared_memory_free_bytes()) if more > 0 else ""
        return ScaleRefused("instances", reason) if reason else None

    def _carry_out(self, actions: Sequence[Action], now_us: int) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case Retire():
                    self._retire(action.name, now_us)
                case Forget():
                    self._remove(action.name)
                case Answer():
                    self._link.answer(action.op, action.answer)

    def _start(self, action: Start) -> None:
        worker = self._workers[action.name] = plan_another(self._templates[action.role], action.name)
        self._supervisor.add(action.name, action.role)
        self._pool.add(worker)
        self._say(f"{action.name} starts: the {action.role} pool grows")

    def _retire(self, name: str, now_us: int) -> None:
        drain_us = int(self._workers[name].scheduler.drain_s * 1e6)
        if self._supervisor.retire(name, now_us, drain_us):
            self._pool.retire(name)
        self._say(f"{name} drains: its pool shrinks")

    def _see_off(self, names: Sequence[str], now_us: int) -> None:
        """Retired instances whose process has ended; those that should have are killed."""
        for name in names:
            self._bury(name)
            self._remove(name)
            self._say(f"{name} is gone")
            self._note(name, InstanceState.GONE, now_us)
        for name in self._supervisor.overdue(now_us):
            self._say(f"{name} does not end: it is killed")
            self._pool.kill(name)

    def _remove(self, name: str) -> None:
        self._pool.remove(name)
        self._supervisor.remove(name)
        del self._workers[name]

    def _note(self, name: str, state: InstanceState, now_us: int, reason: str = "") -> None:
        self._carry_out(self._scaling.note(name, state, reason), now_us)

    # -- lives and deaths

    def _greet(self, ready: set[str], now_us: int, *, quietly: bool = False) -> None:
        for name in sorted(self._supervisor.ready(ready, now_us)):
            if not quietly:
                self._say(f"{name} is ready")
            self._note(name, InstanceState.READY, now_us)

    def _mourn(self, death: Death, now_us: int) -> None:
        self._bury(death.name)
        wait_us = self._supervisor.died(death.name, now_us)
        what = "it is given up" if wait_us is None else f"it starts again in {wait_us / 1e6:g} s"
        log = f"; the end of its log:\n{death.log_tail}" if wait_us is None and death.log_tail else ""
        self._say(f"{death.name} {death.reason}: {what}{log}")
        state = InstanceState.FAILED if wait_us is None else InstanceState.STARTING
        self._note(death.name, state, now_us, f"{death.reason}{log}")

    def _bury(self, name: str) -> None:
        """The Conductor need not wait for a dead process to come back."""
        pid = self._pool.pid(name)
        if pid is not None:
            self._link.ended(self._workers[name].uuid, pid)

    def _replace_hung(self, ready: set[str], now_us: int) -> None:
        members = self._members()
        if members is None:
            self._absences.forget()
            return
        for name in self._absences.observe(ready, members, now_us):
            self._say(f"{name} runs, but the Conductor does not hear it: it is killed")
            self._pool.kill(name)

    def _members(self) -> set[str] | None:
        """Whom any Conductor hears; None when none answers."""
        answers = []
        for client in self._clients:
            with contextlib.suppress(ClientError):
                answers.append({instance.name for instance in client.cluster().instances})
        return set().union(*answers) if answers else None
