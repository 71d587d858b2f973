"""What every page mover offers. Planning which page goes where is the cores' business; a mover only moves.

A mover serves both ends. A *target* describes memory that peers may write (`describe`) and lends pages of it
(`receive`); a *source* registers that description and sends. Arrival is told by the source on the control channel,
after the mover has reported the op done: a mover that finishes an op has made every byte visible at the target.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from segue.errors import ConfigError, SegueError
from segue.handoff_messages import ProcessIdentity, SegmentDescriptor
from segue.ids import AttemptRef, InstanceRef


class MoverError(SegueError):
    """This mover cannot serve this pair, with the reason; nothing was moved."""


class MoveDone(msgspec.Struct, frozen=True):
    """The end of one op: its first `moved` pages have landed."""

    op: int
    moved: int
    error: str = ""


class Mover(Protocol):
    """Calls do not block, but for `register`; `on_done`, given at construction, is called from any thread when `poll`
    has something."""

    def describe(self) -> list[SegmentDescriptor]:
        """How peers may write here, best way first; empty when this side is a source only."""

    def register(self, peer: InstanceRef, process: ProcessIdentity, offers: Sequence[SegmentDescriptor]) -> None:
        """Make a peer known and, with its `offers`, its memory writable. Raises MoverError.

        Probes the memory, which may take seconds: a source calls this off its loop. Without offers (a target) it is
        immediate.
        """

    def send(self, op: int, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[tuple[int, int]]) -> None:
        """Copy own page -> peer's page, in this order. Every op ends with exactly one MoveDone, errors included."""

    def receive(self, peer: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        """`peer` may write just these pages for `attempt`; none: what it was lent is taken back.

        Raises MoverError for a peer that was never registered."""

    def poll(self) -> list[MoveDone]: ...

    def cancel(self, op: int) -> None:
        """Pages of `op` not begun need not be moved. Unknown ops are ignored: the op may just have ended."""

    def fence(self, peer: InstanceRef, attempt: AttemptRef | None = None) -> bool:
        """True when it is proven that no write of `peer` (for `attempt`, if given) can land here any more."""

    def forget(self, peer: InstanceRef) -> None:
        """Drop what `register` made, once nothing is outstanding with the peer."""

    def close(self) -> None:
        """Stop moving, release and unlink own memory. Idempotent."""


MOVERS: dict[str, str] = {
    "cuda_ipc": "kvstore.connectors.cuda_ipc:CudaIpcMover",
    "shared_memory": "kvstore.connectors.shared_memory:SharedMemoryMover",
    "tcp": "kvstore.connectors.tcp:TcpMover",
}


def mover_class(name: str) -> Any:
    """The class behind a name; ConfigError lists the known names."""
    if name not in MOVERS:
        raise ConfigError(f"KV connector {name!r} is unknown; known: {', '.join(sorted(MOVERS))}")
    module, _, attribute = MOVERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
