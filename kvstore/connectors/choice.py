"""Which mover a pair uses: probed when it meets, or forced by configuration (`kv_connector`).

Shared memory costs one copy and no system call, so it is tried first: where the nonce of the target's segment is found,
both ends see the same memory. Everything else goes over TCP. Only the source can try, so it chooses; the target offers
both, lends through both, and learns the choice when it is greeted over TCP. Pages in a GPU's memory go by CUDA IPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.connectors.base import MOVERS, MoveDone, Mover, MoverError
from kvstore.connectors.cuda_driver import CudaDriver
from kvstore.connectors.cuda_ipc import NAME as CUDA_IPC
from kvstore.connectors.cuda_ipc import CudaIpcMover
from kvstore.connectors.device_memory import DeviceError, DevicePages
from kvstore.connectors.shared_memory import SharedMemoryMover
from kvstore.connectors.shared_segment import OwnedSegment
from kvstore.connectors.tcp import TcpMover
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity, SegmentDescriptor
from segue.ids import AttemptRef, InstanceRef

AUTO = "auto"


def check_connector(name: str) -> None:
    """Raises ConfigError that lists the known names."""
    if name not in (AUTO, *MOVERS):
        raise ConfigError(f"KV connector {name!r} is unknown; known: {', '.join((AUTO, *sorted(MOVERS)))}")


def make_mover(
    connector: str,
    ref: InstanceRef,
    pages: memoryview,
    page_bytes: int,
    *,
    segment: OwnedSegment | None,
    listen_host: str | None,
    on_done: Callable[[], None],
    device_pages: DevicePages | None = None,
) -> Mover:
    """`segment` and `listen_host` are set at a target, `device_pages` where the pool is in a GPU's memory: then it is
    CUDA IPC or nothing. Raises ConfigError."""
    check_connector(connector)
    if device_pages is not None:
        return _device_mover(connector, device_pages, is_target=listen_host is not None, on_done=on_done)
    if connector == CUDA_IPC:
        raise ConfigError("KV connector cuda_ipc moves pages between GPUs; the engine runs on a CPU")
    if connector == "shared_memory":
        return SharedMemoryMover(pages, page_bytes, segment=segment, on_done=on_done)
    tcp = TcpMover(ref, pages, page_bytes, listen_host=listen_host, on_done=on_done)
    if connector == "tcp":
        return tcp
    return ProbingMover(SharedMemoryMover(pages, page_bytes, segment=segment, on_done=on_done), tcp)


def _device_mover(connector: str, pages: DevicePages, *, is_target: bool, on_done: Callable[[], None]) -> CudaIpcMover:
    if connector not in (AUTO, CUDA_IPC):
        raise ConfigError(f"KV connector {connector} needs pages in host memory; pages of a GPU go by cuda_ipc")
    try:
        return CudaIpcMover(pages, CudaDriver(pages.address), is_target=is_target, on_done=on_done)
    except DeviceError as error:
        raise ConfigError(f"KV connector cuda_ipc: {error}") from error


class ProbingMover:
    """Shared memory where it is shared, TCP elsewhere, by peer."""

    def __init__(self, shared: SharedMemoryMover, tcp: TcpMover) -> None:
        self._shared = shared
        self._tcp = tcp
        self._every: tuple[Mover, ...] = (shared, tcp)
        self._usable: dict[InstanceRef, tuple[Mover, ...]] = {}
        """At a source the one that was chosen; at a target those that the peer may choose from."""

    def describe(self) -> list[SegmentDescriptor]:
        return [*self._shared.describe(), *self._tcp.describe()]

    def register(self, peer: InstanceRef, process: ProcessIdentity, offers: Sequence[SegmentDescriptor]) -> None:
        """A peer that is met again keeps the mover that was chosen first: the target's fence relies on it."""
        usable: list[Mover] = []
        reasons: list[str] = []
        for mover in self._usable.get(peer, self._every):
            try:
                mover.register(peer, process, offers)
            except MoverError as error:
                reasons.append(str(error))
                continue
            usable.append(mover)
            if offers:
                break
        if not usable:
            raise MoverError("; ".join(reasons))
        self._usable[peer] = tuple(usable)

    def chosen(self, peer: InstanceRef) -> list[str]:
        """Names of the movers that are in question for this peer."""
        names: dict[Mover, str] = {self._shared: "shared_memory", self._tcp: "tcp"}
        return [names[mover] for mover in self._in_question(peer)]

    def send(self, op: int, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        self._usable.get(peer, self._every)[0].send(op, peer, attempt, pages)

    def receive(self, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        for mover in self._usable.get(peer, self._every):
            mover.receive(peer, attempt, pages)

    def poll(self) -> list[MoveDone]:
        return [*self._shared.poll(), *self._tcp.poll()]

    def cancel(self, op: int) -> None:
        for mover in self._every:
            mover.cancel(op)

    def fence(self, peer: InstanceRef, attempt: AttemptRef | None = None) -> bool:
        proofs = [mover.fence(peer, attempt) for mover in self._in_question(peer)]
        return all(proofs)

    def forget(self, peer: InstanceRef) -> None:
        self._usable.pop(peer, None)
        for mover in self._every:
            mover.forget(peer)

    def close(self) -> None:
        for mover in self._every:
            mover.close()

    def _in_question(self, peer: InstanceRef) -> tuple[Mover, ...]:
        return (self._tcp,) if self._tcp.has_greeted(peer) else self._usable.get(peer, self._every)
