"""When each peer was last heard, and who is due a heartbeat. Pure: times come in as arguments."""

from __future__ import annotations

from segue.handoff import HandoffTiming
from segue.ids import InstanceRef


class _Link:
    __slots__ = ("beat_us", "heard_us", "ready")

    def __init__(self, now_us: int) -> None:
        self.ready = False
        self.heard_us = now_us
        self.beat_us = now_us


class PeerLinks:
    """Control channels to the other ends of hand-offs, by incarnation."""

    def __init__(self, timing: HandoffTiming) -> None:
        self._timing = timing
        self._links: dict[InstanceRef, _Link] = {}

    def __contains__(self, peer: InstanceRef) -> bool:
        return peer in self._links

    def open(self, peer: InstanceRef, now_us: int) -> None:
        self._links.setdefault(peer, _Link(now_us))

    def close(self, peer: InstanceRef) -> None:
        self._links.pop(peer, None)

    def mark_ready(self, peer: InstanceRef, now_us: int) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.ready = True
            link.heard_us = now_us

    def is_ready(self, peer: InstanceRef) -> bool:
        link = self._links.get(peer)
        return link is not None and link.ready

    def heard(self, peer: InstanceRef, now_us: int) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.heard_us = now_us

    def is_silent(self, peer: InstanceRef, holder_us: int, since_us: int, now_us: int) -> bool:
        """Whether a ready peer said nothing for `holder_us`, counted from `since_us` at the earliest: an idle link is
        not expected to speak."""
        link = self._links.get(peer)
        if link is None or not link.ready:
            return False
        return now_us - max(link.heard_us, since_us) >= holder_us

    def take_due_beats(self, now_us: int) -> list[InstanceRef]:
        """Ready peers that are due a heartbeat; they count as told."""
        due = [
            peer
            for peer, link in self._links.items()
            if link.ready and now_us - link.beat_us >= self._timing.heartbeat_us
        ]
        for peer in due:
            self._links[peer].beat_us = now_us
        return due
