"""Sequence numbers of published messages: the pure half of `events_zmq`.

A publisher numbers what it says 1, 2, 3, ... over KV events and load reports together and keeps the newest messages
for replay. A reader applies a message only when nothing before it is missing, so that its picture of an instance is
either exact or known to be stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, KvEvent, KvEventBatch, LoadReport, PublishedMessage
from segue.limits import KV_EVENTS_BUFFERED_MAX, KV_EVENTS_PER_BATCH_MAX


class Verdict(Enum):
    APPLY = auto()
    DUPLICATE = auto()
    """Seen already, or said by a predecessor of the instance: ignore."""
    GAP = auto()
    """Something before it is missing: ask for what follows `seen`."""
    RESTARTED = auto()
    """First message of a newer incarnation that is not a snapshot: forget the old one and ask for a snapshot."""


class SequenceTracker:
    """What a reader has applied of each instance uuid."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def seen(self, ref: InstanceRef) -> int:
        """Last sequence applied of this incarnation; 0 when none."""
        incarnation, sequence = self._seen.get(ref.uuid, (ref.incarnation, 0))
        return sequence if incarnation == ref.incarnation else 0

    def accept(self, message: PublishedMessage) -> Verdict:
        """Classify `message`, and count it as applied when the verdict is APPLY."""
        ref = message.ref
        incarnation, sequence = self._seen.get(ref.uuid, (ref.incarnation, 0))
        if ref.incarnation < incarnation:
            return Verdict.DUPLICATE
        restarted = ref.incarnation > incarnation
        last = 0 if restarted else sequence
        if message.sequence <= last:
            return Verdict.DUPLICATE
        snapshot = isinstance(message, KvEventBatch) and message.snapshot
        if message.sequence == last + 1 or snapshot:
            self._seen[ref.uuid] = (ref.incarnation, message.sequence)
            return Verdict.APPLY
        if restarted:
            self._seen[ref.uuid] = (ref.incarnation, 0)
            return Verdict.RESTARTED
        return Verdict.GAP

    def forget(self, uuid: str) -> None:
        self._seen.pop(uuid, None)


class EventLog:
    """Numbers the messages of one instance and keeps the newest for range replay.

    `blocks_kept_max` bounds memory: a gap older than what is kept is answered by a snapshot instead. Blocks, not
    events: one event names all blocks of a prompt.
    """

    def __init__(self, ref: InstanceRef, blocks_kept_max: int = KV_EVENTS_BUFFERED_MAX) -> None:
        self.ref = ref
        self.sequence = 0
        self._kept: deque[PublishedMessage] = deque()
        self._blocks_kept = 0
        self._blocks_kept_max = blocks_kept_max

    def batches(self, events: Sequence[KvEvent], *, snapshot: bool = False) -> Iterator[KvEventBatch]:
        """Number `events`, split to the maximum of a message. A snapshot must start with BlocksCleared."""
        if snapshot and not (events and isinstance(events[0], BlocksCleared)):
            raise ValueError("a snapshot starts with BlocksCleared")
        for start in range(0, len(events), KV_EVENTS_PER_BATCH_MAX):
            part = list(events[start : start + KV_EVENTS_PER_BATCH_MAX])
            first = snapshot and start == 0
            batch = KvEventBatch(self.ref, self.sequence + 1, part, first)
            self._keep(batch)
            yield batch

    def numbered(self, report: LoadReport) -> LoadReport:
        """Keep `report`, whose sequence must be `sequence + 1`."""
        if report.sequence != self.sequence + 1:
            raise ValueError(f"load report numbered {report.sequence}, expected {self.sequence + 1}")
        self._keep(report)
        return report

    def after(self, sequence_seen: int) -> list[PublishedMessage] | None:
        """Messages that follow `sequence_seen`, or None when some are no longer kept: a snapshot is needed."""
        if sequence_seen == self.sequence:
            return []
        if not self._kept or not self._kept[0].sequence - 1 <= sequence_seen < self.sequence or sequence_seen == 0:
            return None
        return [message for message in self._kept if message.sequence > sequence_seen]

    def _keep(self, message: PublishedMessage) -> None:
        self.sequence = message.sequence
        self._kept.append(message)
        self._blocks_kept += _blocks_named(message)
        while self._blocks_kept > self._blocks_kept_max and len(self._kept) > 1:
            self._blocks_kept -= _blocks_named(self._kept.popleft())


def _blocks_named(message: PublishedMessage) -> int:
    """What a message weighs in memory: its block hashes, and one for each event and report beside them."""
    if isinstance(message, LoadReport):
        return 1
    return sum(1 if isinstance(event, BlocksCleared) else 1 + len(event.hashes) for event in message.events)
