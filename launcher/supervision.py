"""Which dead instances are started again, when, and which are given up. Pure: names and times in, names out.

A slot that served for a while starts again at once: whatever killed it (a kernel out of memory, an operator) is over.
One that dies young waits, twice as long each time, and is given up after `deaths_max` such deaths in a row: its model,
its device or the request it is given kills it, and starting it for ever would only hide that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from segue.manifest import Role

ABSENT_US_MAX = 10_000_000
"""A live process that the Conductor has not heard for so long hangs: three heartbeats, and time to register again."""


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    stable_us: int = 10_000_000
    """Serving for this long ends a row of deaths."""
    backoff_first_us: int = 250_000
    backoff_us_max: int = 30_000_000
    deaths_max: int = 6
    """Young deaths in a row: about 15 s of attempts, beside what starting takes."""


RETIRE_MARGIN_US = 25_000_000
"""A retired instance ends by itself soon after its time to drain is over; one that has not by then hangs."""


class _Slot:
    __slots__ = ("deaths", "given_up", "ready_us", "retire_until_us", "start_us")

    def __init__(self) -> None:
        self.deaths = 0
        self.given_up = False
        self.ready_us: int | None = None
        self.start_us: int | None = None
        """When it is to be started again; None while its process runs."""
        self.retire_until_us: int | None = None
        """Set when it is to leave: it is not started again, and killed when it still runs then."""


class Supervisor:
    """The slots of one cluster, which may grow and shrink. `died` and `ready` may be said again and again, as a poll
    finds them."""

    def __init__(self, roles: Mapping[str, Role], limits: RestartLimits | None = None) -> None:
        self._roles = dict(roles)
        self._limits = limits or RestartLimits()
        self._slots = {name: _Slot() for name in roles}

    def add(self, name: str, role: Role) -> None:
        """Its first process was started."""
        self._roles[name], self._slots[name] = role, _Slot()

    def retire(self, name: str, now_us: int, drain_us: int) -> bool:
        """It was told to leave; False when no process of it runs."""
        slot = self._slots[name]
        slot.retire_until_us = now_us + drain_us + RETIRE_MARGIN_US
        ran, slot.start_us = self._runs(name), None
        return ran

    def remove(self, name: str) -> None:
        del self._roles[name], self._slots[name]

    def retired(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that were told to leave."""
        return [name for name in names if self._slots[name].retire_until_us is not None]

    def overdue(self, now_us: int) -> list[str]:
        """Retired instances that should be gone; each is named once."""
        slots = self._slots.items()
        late = [name for name, slot in slots if slot.retire_until_us is not None and slot.retire_until_us <= now_us]
        for name in late:
            self._slots[name].retire_until_us = now_us + RETIRE_MARGIN_US
        return late

    def ready(self, names: Iterable[str], now_us: int) -> list[str]:
        """Those of `names` that were not known to serve."""
        fresh = [name for name in names if self._awaits_ready(name)]
        for name in fresh:
            self._slots[name].ready_us = now_us
        return fresh

    def died(self, name: str, now_us: int) -> int | None:
        """Take note of a death: in how many microseconds the slot starts again, or None when it is given up.

        Only for names of `awaited_deaths`."""
        slot, limits = self._slots[name], self._limits
        stable = slot.ready_us is not None and now_us - slot.ready_us >= limits.stable_us
        slot.deaths = 1 if stable else slot.deaths + 1
        slot.ready_us = None
        if slot.deaths > limits.deaths_max:
            slot.given_up = True
            return None
        wait_us = 0 if stable else min(limits.backoff_first_us << (slot.deaths - 1), limits.backoff_us_max)
        slot.start_us = now_us + wait_us
        return wait_us

    def awaited_deaths(self, names: Iterable[str]) -> list[str]:
        """Those of `names` whose death was not asked for and has not been taken note of."""
        return [name for name in names if self._runs(name) and self._slots[name].retire_until_us is None]

    def take_due(self, now_us: int) -> list[str]:
        """Slots to start now; they count as started."""
        due = [name for name, slot in self._slots.items() if slot.start_us is not None and slot.start_us <= now_us]
        for name in due:
            self._slots[name].start_us = None
        return due

    @property
    def given_up(self) -> list[str]:
        return [name for name, slot in self._slots.items() if slot.given_up]

    @property
    def can_serve(self) -> bool:
        """Whether what is left can serve a request: decode instances without a prefill instance prefill themselves."""
        slots = self._slots.items()
        left = {self._roles[name] for name, slot in slots if not slot.given_up and slot.retire_until_us is None}
        return bool(left & {Role.DECODE, Role.AGGREGATED})

    def _awaits_ready(self, name: str) -> bool:
        slot = self._slots[name]
        return self._runs(name) and slot.ready_us is None and slot.retire_until_us is None

    def _runs(self, name: str) -> bool:
        slot = self._slots[name]
        return slot.start_us is None and not slot.given_up


class Absences:
    """Instances whose process runs but which no Conductor has: hung, stopped, or cut off."""

    def __init__(self, absent_us_max: int = ABSENT_US_MAX) -> None:
        self._absent_us_max = absent_us_max
        self._since: dict[str, int] = {}

    def observe(self, ready: Iterable[str], members: Iterable[str], now_us: int) -> list[str]:
        """`ready` have announced themselves. Those absent for too long; each is named once."""
        missing = set(ready).difference(members)
        self._since = {name: self._since.get(name, now_us) for name in sorted(missing)}
        hung = [name for name, since_us in self._since.items() if now_us - since_us >= self._absent_us_max]
        for name in hung:
            del self._since[name]
        return hung

    def forget(self) -> None:
        """The Conductor did not answer: nothing is known of anybody."""
        self._since.clear()
