"""Pages between two processes of one machine: one memcpy from the source's pool straight into the target's.

The target's pool *is* a shared segment; there is no staging and nothing for the target to do when pages arrive. One
thread copies, in order, outside the GIL; runs of neighbouring pages become one copy.

Fence. A mapping cannot be revoked from outside, so the only proof against an uncooperative peer is that its process has
ended (`ProcessWatch`). The cooperative proof, the peer's word on the control channel, is the cores' business.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.process_identity import ProcessWatch
from kvstore.connectors.shared_segment import MappedSegment, OwnedSegment
from segue.handoff_messages import ProcessIdentity, SegmentDescriptor
from segue.ids import AttemptRef, InstanceRef

RUN_BYTES_MAX = 128 << 20
"""Largest single copy: a cancel is noticed within some 20 ms. Long runs pay: above a threshold near the size of the
last cache level, memcpy writes past the caches and saves reading every line that it is about to overwrite."""

PageArray = npt.NDArray[np.uint8]


def page_runs(pages: Sequence[tuple[int, int]], pages_max: int) -> list[tuple[int, int, int]]:
    """(source, target, count) of neighbouring pages, each at most `pages_max` long, in order."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pages:
        if runs:
            first, to, count = runs[-1]
            if source == first + count and target == to + count and count < pages_max:
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((source, target, 1))
    return runs


class _Peer:
    def __init__(self, process: ProcessIdentity) -> None:
        self.watch = ProcessWatch(process)
        self.segment: MappedSegment | None = None
        self.pages: PageArray | None = None

    def close(self) -> None:
        self.pages = None
        self.watch.close()
        if self.segment is not None:
            self.segment.close()


class SharedMemoryMover:
    """`pages` is this instance's pool: `segment.pages` at a target, any buffer at a source."""

    def __init__(
        self,
        pages: memoryview,
        page_bytes: int,
        *,
        segment: OwnedSegment | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._page_bytes = page_bytes
        self._segment = segment
        self._own: PageArray | None = np.frombuffer(pages, dtype=np.uint8).reshape(-1, page_bytes)
        self._on_done = on_done
        self._peers: dict[InstanceRef, _Peer] = {}
        self._jobs: queue.SimpleQueue[tuple[int, InstanceRef, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._outstanding: set[int] = set()
        self._done: deque[MoveDone] = deque()
        self._thread = threading.Thread(target=self._run, name="page-mover", daemon=True)
        self._thread.start()

    def describe(self) -> list[SegmentDescriptor]:
        return [] if self._segment is None else [self._segment.descriptor]

    def register(self, peer: InstanceRef, process: ProcessIdentity, offers: Sequence[SegmentDescriptor]) -> None:
        segment = next((offer for offer in offers if offer.mover == "shared_memory"), None)
        if offers and segment is None:
            raise MoverError("the peer shares no memory")
        made = _Peer(process)
        try:
            if segment is not None:
                self._attach(made, segment)
            elif not made.watch.is_local:
                raise MoverError("the peer runs on another machine")
        except MoverError:
            made.close()
            raise
        self.forget(peer)
        self._peers[peer] = made

    def _attach(self, made: _Peer, segment: SegmentDescriptor) -> None:
        if segment.page_bytes != self._page_bytes:
            raise MoverError(f"pages of {segment.page_bytes} bytes do not fit {self._page_bytes}")
        made.segment = MappedSegment(segment)
        made.pages = np.frombuffer(made.segment.pages, dtype=np.uint8).reshape(-1, self._page_bytes)

    def send(self, op: int, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        self._outstanding.add(op)
        self._jobs.put((op, peer, list(pages)))

    def receive(self, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        """The whole segment is mapped by the peer already; lending is a matter of the control channel."""
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
            known.close()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._jobs.put(None)
        self._thread.join()
        for peer in list(self._peers):
            self.forget(peer)
        self._own = None
        if self._segment is not None:
            self._segment.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, peer, pages = job
            moved, error = self._copy(op, peer, pages)
            self._done.append(MoveDone(op, moved, error))
            self._on_done()

    def _copy(self, op: int, peer: InstanceRef, pages: list[tuple[int, int]]) -> tuple[int, str]:
        known = self._peers.get(peer)
        target = None if known is None else known.pages
        own = self._own
        if target is None or own is None:
            return 0, f"{peer} is not registered"
        if any(not (0 <= source < len(own) and 0 <= to < len(target)) for source, to in pages):
            return 0, "page number out of range"
        moved = 0
        for source, to, count in page_runs(pages, max(1, RUN_BYTES_MAX // self._page_bytes)):
            if op in self._cancelled:
                return moved, "cancelled"
            target[to : to + count] = own[source : source + count]
            moved += count
        return moved, ""
