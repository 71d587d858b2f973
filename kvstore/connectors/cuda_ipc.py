"""Pages between two processes with memory on one GPU (or on peers): device copies into the target's opened pool.

The target exports its pool's allocation and marks the bytes behind the pages with a nonce; the source opens it and
finds the nonce there, so that what it writes to is the pool that was meant. There is no staging, and nothing for the
target to do when pages arrive: an op is reported done when its copies have landed in device memory, which both see.

A GPU's identity is its uuid, not its number: numbers depend on what each process may see. Inside one process a handle
cannot be opened; there the address itself is used.

Fence. As with shared memory, an open handle cannot be revoked from outside, so the only proof against a peer that does
not answer is that its process has ended: the driver then tears its copies down with it.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.device_memory import HANDLE_BYTES, DeviceDriver, DeviceError, DevicePages, Exported
from kvstore.connectors.process_identity import ProcessWatch, this_process
from kvstore.connectors.shared_memory import page_runs
from segue.handoff_messages import ProcessIdentity, SegmentDescriptor
from segue.ids import AttemptRef, InstanceRef

NAME = "cuda_ipc"
FORMAT = "1"
"""First field of a location. Raised when its meaning changes."""

NONCE_BYTES = 32
BATCH_BYTES_MAX = 1 << 30
"""Copied between two looks at cancellations: a millisecond of device time."""
BATCH_RUNS_MAX = 1024


def location_of(exported: Exported, address: int) -> str:
    """`format:handle:offset:device:address`; the address means something in the exporting process alone."""
    return ":".join((FORMAT, exported.handle.hex(), str(exported.offset), exported.device_uuid, str(address)))


def read_location(location: str) -> tuple[Exported, int]:
    """(what to open, address within the exporting process); MoverError for anything else."""
    fields = location.split(":")
    try:
        if fields[0] != FORMAT:
            raise MoverError(f"device memory is described in format {fields[0]!r}; this version reads {FORMAT}")
        handle, offset, device, address = fields[1:]
        exported = Exported(bytes.fromhex(handle), int(offset), device)
        if len(exported.handle) != HANDLE_BYTES or exported.offset < 0:
            raise ValueError("handle or offset out of range")
        return exported, int(address)
    except ValueError as error:
        raise MoverError(f"malformed description of device memory: {error}") from error


class _Peer:
    """`address` is that of its page 0 in this process, None at a target."""

    def __init__(self, process: ProcessIdentity) -> None:
        self.process = process
        self.watch = ProcessWatch(process)
        self.opened: Exported | None = None
        self.address: int | None = None
        self.pages = 0


class CudaIpcMover:
    """`pages` is this instance's pool; at a target (`is_target`) peers may write it."""

    def __init__(
        self,
        pages: DevicePages,
        driver: DeviceDriver,
        *,
        is_target: bool = False,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._pages, self._driver, self._on_done = pages, driver, on_done
        self._offers = [self._offer()] if is_target else []
        self._peers: dict[InstanceRef, _Peer] = {}
        self._copying = threading.Lock()
        """Held while copies run and while a peer's memory is closed."""
        self._jobs: queue.SimpleQueue[tuple[int, InstanceRef, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._outstanding: set[int] = set()
        self._done: deque[MoveDone] = deque()
        self._thread = threading.Thread(target=self._run, name="device-page-mover", daemon=True)
        self._thread.start()

    def _offer(self) -> SegmentDescriptor:
        pages, nonce = self._pages, secrets.token_bytes(NONCE_BYTES)
        size = pages.pages * pages.page_bytes
        self._driver.write(pages.address + size, nonce)
        location = location_of(self._driver.export(pages.address), pages.address)
        return SegmentDescriptor(NAME, location, pages.pages, pages.page_bytes, size, nonce)

    def describe(self) -> list[SegmentDescriptor]:
        return list(self._offers)

    def register(self, peer: InstanceRef, process: ProcessIdentity, offers: Sequence[SegmentDescriptor]) -> None:
        mine = [offer for offer in offers if offer.mover == NAME]
        if offers and not mine:
            raise MoverError(f"{peer} offers no device memory")
        made = _Peer(process)
        if not made.watch.is_local:
            made.watch.close()
            raise MoverError(f"{peer} runs on another machine or in another pid namespace")
        self.forget(peer)  # first: the driver opens an allocation once
        try:
            if mine:
                self._open(made, mine[0])
        except (DeviceError, MoverError) as error:
            made.watch.close()
            raise MoverError(str(error)) from error
        self._peers[peer] = made

    def _open(self, peer: _Peer, offer: SegmentDescriptor) -> None:
        if offer.page_bytes != self._pages.page_bytes:
            raise MoverError(f"pages of {offer.page_bytes} bytes; here {self._pages.page_bytes}")
        if offer.nonce_offset != offer.pages * offer.page_bytes or not offer.nonce:
            raise MoverError("malformed description of device memory: its mark is not behind its pages")
        exported, address = read_location(offer.location)
        if peer.process == this_process():
            peer.address = address
        else:
            peer.address, peer.opened = self._driver.open(exported), exported
        peer.pages = offer.pages
        if self._driver.read(peer.address + offer.nonce_offset, len(offer.nonce)) != offer.nonce:
            self._shut(peer)
            raise MoverError("device memory is not the peer's: the nonce differs")

    def _shut(self, peer: _Peer) -> None:
        with self._copying:
            if peer.opened is not None and peer.address is not None:
                self._driver.close(peer.opened, peer.address)
            peer.opened = peer.address = None

    def send(self, op: int, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        self._outstanding.add(op)
        self._jobs.put((op, peer, list(pages)))

    def receive(self, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        """The peer has the whole pool open already; lending is a matter of the control channel."""
        if pages and peer not in self._peers:
            raise MoverError(f"{peer} was never registered")

    def poll(self) -> list[MoveDone]:
        finished = []
        while self._done:
            finished.append(self._done.popleft())
        for done in finished:
            self._outstanding.discard(done.op)
            self._cancelled.discard(done.op)
        return finished

    def cancel(self, op: int) -> None:
        if op in self._outstanding:
            self._cancelled.add(op)

    def fence(self, peer: InstanceRef, attempt: AttemptRef | None = None) -> bool:
        known = self._peers.get(peer)
        return known is None or known.watch.is_gone()

    def forget(self, peer: InstanceRef) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._shut(known)
            known.watch.close()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._jobs.put(None)
        self._thread.join()
        for peer in list(self._peers):
            self.forget(peer)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, peer, pages = job
            with self._copying:
                moved, error = self._copy(op, peer, pages)
            self._done.append(MoveDone(op, moved, error))
            self._on_done()

    def _copy(self, op: int, peer: InstanceRef, pages: list[tuple[int, int]]) -> tuple[int, str]:
        known = self._peers.get(peer)
        if known is None or known.address is None:
            return 0, f"{peer} is not registered"
        if any(not (0 <= source < self._pages.pages and 0 <= to < known.pages) for source, to in pages):
            return 0, "page number out of range"
        size, moved = self._pages.page_bytes, 0
        runs = deque(page_runs(pages, max(1, BATCH_BYTES_MAX // size)))
        while runs:
            if op in self._cancelled:
                return moved, "cancelled"
            batch = [runs.popleft()]
            taken = batch[0][2]
            while runs and len(batch) < BATCH_RUNS_MAX and (taken + runs[0][2]) * size <= BATCH_BYTES_MAX:
                taken += runs[0][2]
                batch.append(runs.popleft())
            try:
                self._driver.copy(
                    [
                        (self._pages.address + source * size, known.address + to * size, count * size)
                        for source, to, count in batch
                    ]
                )
            except DeviceError as error:
                return moved, str(error)
            moved += taken
        return moved, ""
