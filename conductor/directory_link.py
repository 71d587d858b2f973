"""This Conductor's place in the directory: announced, the other Conductors known, and what all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.tenant_limits import TenantLimiter
from kvstore.directory_choice import open_directory
from kvstore.directory_members import ConductorEntry, ConductorMembers
from segue.config import FrontConfig

TENANT_SECRET = "tenant-secret"


class DirectoryLink:
    """Built before the gateway, which needs `tenants`; `run` once the servers accept. `secret` is this process's own
    tenant secret; `share_secret` gets the one that all Conductors use, to find the same cached blocks."""

    def __init__(self, config: FrontConfig, name: str, clock_us: Callable[[], int], secret: bytes) -> None:
        self._directory = open_directory(config.directory, clock_us)
        shared = self._directory.shared_tenants(config.tenants)
        self.tenants = TenantLimiter(config.tenants, name, clock_us, shared)
        self._lease_ms = config.directory.lease_ms
        self._name = name
        self._secret = secret
        self._share_secret: Callable[[bytes], None] = lambda _: None
        self._members = ConductorMembers(self._directory, lease_ms=self._lease_ms, also=self._agree)

    def peers(self) -> list[str]:
        """gRPC addresses of the other Conductors."""
        return sorted(entry.grpc for name, entry in self._members.entries.items() if name != self._name)

    async def announce(self, grpc: str, http: str, share_secret: Callable[[bytes], None]) -> None:
        """Before clients come: a first round, whether it is answered or not."""
        self._share_secret = share_secret
        self._members.own = ConductorEntry(name=self._name, grpc=grpc, http=http)
        await self._members.refresh()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._members.run(), name="directory members")
            parts.create_task(self.tenants.run(), name="tenant limits")

    async def withdraw(self) -> None:
        await self._members.withdraw()

    async def close(self) -> None:
        await self._directory.close()

    def metrics(self) -> Collector:
        return DirectoryCollector(self._members, self.tenants)

    async def _agree(self) -> None:
        """In every round: after a loss of the directory's data the secret in use is proposed again."""
        agreed = await self._directory.agree(TENANT_SECRET, self._secret)
        if agreed != self._secret:
            self._secret = agreed
            self._share_secret(agreed)


class DirectoryCollector(Collector):
    """Read at scrape time."""

    def __init__(self, members: ConductorMembers, tenants: TenantLimiter) -> None:
        self._members = members
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        members, tenants = self._members, self._tenants
        yield GaugeMetricFamily("segue:directory_up", "1 while the directory answers.", value=float(members.is_up))
        yield GaugeMetricFamily(
            "segue:conductors", "Conductors in the directory, this one too.", value=len(members.entries)
        )
        yield CounterMetricFamily("segue:directory_failures", "Rounds it did not answer.", value=members.failures)
        text = "Admissions by this Conductor's own count, because the directory was away."
        yield CounterMetricFamily("segue:tenant_decisions_alone", text, value=tenants.decided_alone)
