"""Tenant limits at the edge: a place for each request, and its tokens charged as they come, over all Conductors.

A request asks twice: the ledger of this process, which needs nobody, then the shared count. While the directory is
away the first answer counts alone, so no request fails for it; what was used meanwhile is told when it is back. A
Conductor that dies says nothing more about its requests, and their places are free after PLACE_LEASE_MS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable

from kvstore.directory import DirectoryUnavailable
from kvstore.directory_tenants import TOKENS, Settlement, SharedTenants, TenantLedger, TenantRefusal
from segue.config import TenantLimits
from segue.errors import InvalidField, Overloaded
from segue.limits import LIVE_REQUESTS_MAX

log = logging.getLogger(__name__)

PLACE_LEASE_MS = 15_000
HOLD_EVERY_US = 5_000_000
SETTLE_EVERY_US = 1_000_000
"""How late generated tokens are charged at most."""

ANSWER_S_MAX = 0.25
"""What the shared count may add to a request's TTFT; a directory that is slower is treated as away."""

AWAY_US = 1_000_000
"""After a failure nobody waits for the directory for so long."""


class Ticket:
    """A live request's place. `uncharged` counts generated tokens that are not charged yet."""

    __slots__ = ("key", "tenant", "uncharged")

    def __init__(self, tenant: str, key: str) -> None:
        self.tenant = tenant
        self.key = key
        self.uncharged = 0


class TenantLimiter:
    """`name` is this Conductor's. Without limits `admit` gives no ticket and nothing is counted."""

    def __init__(
        self, limits: TenantLimits, name: str, clock_us: Callable[[], int], shared: SharedTenants | None = None
    ) -> None:
        self._limits = limits
        self._name = name
        self._clock_us = clock_us
        self._shared = shared
        self._ledger = TenantLedger(limits)
        self._tickets: dict[str, Ticket] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=LIVE_REQUESTS_MAX)
        """Places to give back; the oldest of too many end with their lease."""
        self._owed: Counter[str] = Counter()
        """Tokens by tenant that the shared count does not know yet."""
        self._wake = asyncio.Event()
        self._count = 0
        self._away_until_us = 0
        self._held_us = 0
        self._charged_us = 0
        self.decided_alone = 0
        """Admissions without the shared count, because the directory was away."""

    @property
    def is_active(self) -> bool:
        return bool(self._limits.requests_max or self._limits.tokens_per_minute)

    def check_choices(self, choices: int) -> None:
        """Raises InvalidField for a call with more choices, each one live request, than a tenant may ever have."""
        most = self._limits.requests_max
        if 0 < most < choices:
            raise InvalidField("n", f"makes {choices} requests of this call, a tenant may have {most} at once")

    async def admit(self, tenant: str, tokens: int, field: str = "prompt") -> Ticket | None:
        """A place, and `tokens` of prompt charged. Raises Overloaded, or InvalidField for what could never fit."""
        if not self.is_active:
            return None
        per_minute = self._limits.tokens_per_minute
        if 0 < per_minute < tokens:
            raise InvalidField(field, f"has {tokens} tokens, a tenant may use {per_minute} per minute")
        self._count += 1
        ticket = Ticket(tenant, f"{self._name}/{self._count:x}")
        refusal = self._ledger.admit(self._clock_us(), tenant, ticket.key, tokens)
        if refusal is None and self._shared is not None:
            refusal = await self._ask_shared(self._shared, ticket, tokens)
        if refusal is not None:
            raise self._overloaded(tenant, refusal)
        self._tickets[ticket.key] = ticket
        return ticket

    def end(self, ticket: Ticket) -> None:
        """Give the place back. Idempotent."""
        if self._tickets.pop(ticket.key, None) is None:
            return
        self._charge(ticket)
        self._ledger.release(self._clock_us(), ticket.tenant, ticket.key)
        self._give_back(ticket)

    async def run(self) -> None:
        """Until cancelled: charge what was generated, and tell the shared count."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SETTLE_EVERY_US / 1e6)
            self._wake.clear()
            self._charge_live()
            if self._shared is not None and self.is_active and not await self._settle(self._shared):
                await asyncio.sleep(SETTLE_EVERY_US / 1e6)

    async def _ask_shared(self, shared: SharedTenants, ticket: Ticket, tokens: int) -> TenantRefusal | None:
        now_us = self._clock_us()
        refusal = None
        if now_us >= self._away_until_us:
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    refusal = await shared.admit(ticket.tenant, ticket.key, tokens, PLACE_LEASE_MS)
                if refusal is not None:
                    self._ledger.release(self._clock_us(), ticket.tenant, ticket.key, refund=tokens)
                return refusal
            except (TimeoutError, DirectoryUnavailable) as error:
                log.warning("tenant limits are counted without the other Conductors: %s", error or "no answer in time")
                self._away_until_us = now_us + AWAY_US
            except asyncio.CancelledError:
                self._ledger.release(self._clock_us(), ticket.tenant, ticket.key, refund=tokens)
                self._give_back(ticket)
                raise
        self.decided_alone += 1
        self._owed[ticket.tenant] += tokens
        return None

    async def _settle(self, shared: SharedTenants) -> bool:
        """Tell what is new; False when it could not be told, and is kept."""
        now_us = self._clock_us()
        holds = now_us - self._held_us >= HOLD_EVERY_US
        ended, owed = list(self._ended), self._owed
        live = self._live() if holds else {}
        if not ended and not owed and not live:
            return True
        self._owed = Counter()
        self._ended.clear()
        try:
            await shared.settle(Settlement(released=ended, charged=dict(owed), live=live), PLACE_LEASE_MS)
        except DirectoryUnavailable:
            self._owed.update(owed)
            self._ended.extendleft(reversed(ended[: LIVE_REQUESTS_MAX - len(self._ended)]))
            self._held_us = 0
            return False
        self._held_us = now_us if holds else self._held_us
        return True

    def _live(self) -> dict[str, list[str]]:
        live: dict[str, list[str]] = {}
        for ticket in self._tickets.values():
            live.setdefault(ticket.tenant, []).append(ticket.key)
        return live

    def _charge_live(self) -> None:
        now_us = self._clock_us()
        if now_us - self._charged_us >= SETTLE_EVERY_US:
            self._charged_us = now_us
            for ticket in self._tickets.values():
                self._charge(ticket)

    def _charge(self, ticket: Ticket) -> None:
        if ticket.uncharged and self._limits.tokens_per_minute:
            self._ledger.charge(self._clock_us(), ticket.tenant, ticket.uncharged)
            if self._shared is not None:
                self._owed[ticket.tenant] += ticket.uncharged
        ticket.uncharged = 0

    def _give_back(self, ticket: Ticket) -> None:
        if self._shared is not None:
            self._ended.append((ticket.tenant, ticket.key))
            self._wake.set()

    def _overloaded(self, tenant: str, refusal: TenantRefusal) -> Overloaded:
        who = f"tenant {tenant!r}" if tenant else "the tenant without a name"
        if refusal.resource == TOKENS:
            text = f"{who} has spent {refusal.used} of its {self._limits.tokens_per_minute} tokens per minute"
        elif refusal.resource == "tenants":
            text = f"{refusal.used} tenants are active"
        else:
            text = f"{who} has {refusal.used} live requests, at most {self._limits.requests_max} are allowed"
        return Overloaded(text, resource=refusal.resource, retry_after_ms=refusal.retry_after_ms)
