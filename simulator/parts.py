"""How the parts of a simulated cluster find each other: what live code does by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from conductor.core.events import Event as ConductorEvent
from segue.block_pool import BlockPool
from segue.errors import RequestError
from segue.ids import AttemptRef, InstanceRef
from segue.manifest import InstanceManifest
from segue.plan import BatchPlan, PlanResult
from segue.worker_messages import Assign, Peer, TokenDelta
from simulator.event_heap import EventHeap
from simulator.links import SharedLinks
from simulator.network import Network
from worker_runtime.events import Event as WorkerEvent


class SimEngine(Protocol):
    """Executes one plan at a time in virtual time."""

    step_ends_us: list[int]
    """When each step of the present, or last, plan ends."""

    @property
    def is_busy(self) -> bool: ...

    def launch(self, plan: BatchPlan, now_us: int) -> int:
        """Begin; when it will be finished."""

    def truncate(self, now_us: int) -> int | None:
        """End with the running step; the new end, None when nothing changes."""

    def collect(self) -> PlanResult: ...

    def copy_page(self, source: SimEngine, source_page: int, own_page: int) -> None:
        """A page of another engine's pool has landed here."""


class WorkerPort(Protocol):
    manifest: InstanceManifest
    engine: SimEngine
    pool: BlockPool
    alive: bool

    def post(self, event: WorkerEvent) -> None: ...

    def resync(self, sequence_seen: int) -> None: ...

    def fetch(self, source: str, hashes: list[bytes], then: Callable[[], None]) -> None:
        """Copy blocks of a chain from another instance into the cache, as far as there is room; then call `then`."""


class ConductorPort(Protocol):
    name: str

    def post(self, event: ConductorEvent) -> None: ...


class FrontPort(Protocol):
    """The gateway of a simulation."""

    name: str

    def assignment(self, key: AttemptRef, prefill: Peer | None, decode: Peer) -> Assign | None:
        """What both workers get; None when the request ended meanwhile."""

    def on_placed(self, key: AttemptRef, prefill: str, decode: str) -> None: ...

    def on_rejected(self, key: AttemptRef, error: RequestError) -> None: ...

    def on_attempt_failed(self, key: AttemptRef, reason: str) -> None: ...

    def on_handoff_complete(self, key: AttemptRef) -> None: ...

    def receive(self, source: InstanceRef, instance: str, delta: TokenDelta, times_us: list[int]) -> None:
        """`times_us`: when each token of the delta was sampled."""


class Parts(Protocol):
    heap: EventHeap
    network: Network
    links: SharedLinks

    def worker(self, ref: InstanceRef | None) -> WorkerPort | None:
        """The live worker of this very incarnation."""

    def conductors(self) -> list[ConductorPort]: ...

    def conductor(self, name: str) -> ConductorPort | None: ...

    def front(self, name: str) -> FrontPort: ...
