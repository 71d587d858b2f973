"""Pools that change size while the cluster runs: what each order starts and retires, and when it is done. Pure.

A pool shrinks from its end, after what does not serve anyway: instances given up, then those still starting. A retired
instance drains: it is counted until its process has ended. An order is over when every instance that the pool should
have serves (or was given up) and every retired one is gone; a later order for the same pool replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from segue.limits import INSTANCES_MAX
from segue.manifest import Role
from segue.pool_messages import InstanceChange, InstanceState, ScaleAnswer, ScaleDone, ScaleOrder, ScaleRefused

SCALABLE = (Role.PREFILL, Role.DECODE)
LIVE = (InstanceState.STARTING, InstanceState.READY)
NUMBERED = re.compile(r".*-(\d+)")


class Start(msgspec.Struct, frozen=True):
    name: str
    role: Role


class Retire(msgspec.Struct, frozen=True):
    name: str


class Forget(msgspec.Struct, frozen=True):
    """An instance that was given up before: nothing of it runs."""

    name: str


class Answer(msgspec.Struct, frozen=True):
    op: int
    answer: ScaleAnswer


Action = Start | Retire | Forget | Answer


class Scaling:
    """`roles` and `states` of all instances, kept up to date by `note`."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = dict(roles)
        self._states = dict.fromkeys(roles, InstanceState.STARTING)
        self._orders: dict[Role, ScaleOrder] = {}

    def roles(self) -> dict[str, Role]:
        return dict(self._roles)

    def members(self, role: Role, *states: InstanceState) -> list[str]:
        """In order of their numbers."""
        names = [name for name, own in self._roles.items() if own is role and self._states[name] in (states or LIVE)]
        return sorted(names, key=_number)

    def take(self, order: ScaleOrder) -> list[Action]:
        """What to do now. A refusal is one Answer and changes nothing."""
        refusal = self._refusal(order)
        if refusal is not None:
            return [Answer(order.op, refusal)]
        role = Role(order.pool)
        actions: list[Action] = []
        replaced = self._orders.pop(role, None)
        if replaced is not None:
            reason = f"replaced by a later order: {order.instances} {role} instances"
            actions.append(Answer(replaced.op, ScaleRefused("", reason)))
        self._orders[role] = order
        actions += [Forget(name) for name in self.members(role, InstanceState.FAILED)]
        for action in actions:
            if isinstance(action, Forget):
                self._drop(action.name)
        return actions + self._resize(role, order.instances) + self._finish(role)

    def note(self, name: str, state: InstanceState, reason: str = "") -> list[Action]:
        """An instance has come to `state`. GONE: its process has ended after it was retired."""
        if name not in self._roles or self._states[name] is state:
            return []
        role = self._roles[name]
        if state is InstanceState.GONE:
            self._drop(name)
        else:
            self._states[name] = state
        order = self._orders.get(role)
        if order is None:
            return []
        return [Answer(order.op, InstanceChange(name, state, reason)), *self._finish(role)]

    def _refusal(self, order: ScaleOrder) -> ScaleRefused | None:
        if order.pool not in SCALABLE:
            return ScaleRefused("pool", f"{order.pool!r} is no pool: known are {', '.join(SCALABLE)}")
        role = Role(order.pool)
        if role not in self._roles.values() and Role.AGGREGATED in self._roles.values():
            return ScaleRefused("pool", f"this cluster has no {role} pool: its instances are aggregated")
        others = sum(own is not role for own in self._roles.values())
        if order.instances + others > INSTANCES_MAX:
            message = f"{order.instances} beside {others} other instances: a cluster has at most {INSTANCES_MAX}"
            return ScaleRefused("instances", message)
        if order.instances < 1:
            return ScaleRefused("instances", f"0: without a {role} instance no request could be served as configured")
        return None

    def _resize(self, role: Role, wanted: int) -> list[Action]:
        present = self.members(role)
        op = self._orders[role].op
        actions: list[Action] = []
        for name in _last(present, self._states, len(present) - wanted):
            self._states[name] = InstanceState.DRAINING
            actions += [Retire(name), Answer(op, InstanceChange(name, InstanceState.DRAINING))]
        for name in _free_names(role, self._roles, wanted - len(present)):
            self._roles[name], self._states[name] = role, InstanceState.STARTING
            actions += [Start(name, role), Answer(op, InstanceChange(name, InstanceState.STARTING))]
        return actions

    def _finish(self, role: Role) -> list[Action]:
        if self.members(role, InstanceState.STARTING, InstanceState.DRAINING):
            return []
        order = self._orders.pop(role)
        return [Answer(order.op, ScaleDone(len(self.members(role))))]

    def _drop(self, name: str) -> None:
        del self._roles[name], self._states[name]


def _number(name: str) -> int:
    found = NUMBERED.fullmatch(name)
    return int(found[1]) if found else 0


def _last(names: list[str], states: Mapping[str, InstanceState], count: int) -> list[str]:
    """Which `count` of a pool go: those that do not serve yet before those that do, high numbers before low ones."""
    order: dict[str, tuple[bool, int]] = {
        name: (states[name] is InstanceState.STARTING, _number(name)) for name in names
    }
    return sorted(names, key=order.__getitem__, reverse=True)[: max(count, 0)]


def _free_names(role: Role, taken: Iterable[str], count: int) -> list[str]:
    """The lowest free numbers; a draining instance still has its name."""
    used, names, number = set(taken), list[str](), 0
    while len(names) < count:
        if (name := f"{role.value}-{number}") not in used:
            names.append(name)
        number += 1
    return names
