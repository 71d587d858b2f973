"""When each peer was last heard, who is due a heartbeat, and what the lists in heartbeats prove.

A connection that breaks swallows messages on both ends, and ZeroMQ makes a new one without a word. What was lost shows
in the lists: an attempt that the peer is known to have had, and that it does not name any more, is over there. Known
from when on matters, because a list may have been written before the peer had the attempt: it counts only when it
answers (`Heartbeat.heard_us`) something that was said after that.

Pure: times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from segue.handoff import HandoffTiming
from segue.handoff_messages import Heartbeat
from segue.ids import AttemptRef, InstanceRef


def let_go(beat: Heartbeat, known: Mapping[AttemptRef, int | None]) -> list[AttemptRef]:
    """Those of `known` that the sender of `beat` has no more. Values: since when it is known to have had the attempt,
    None while it is not."""
    live = set(beat.live)
    return [
        key for key, since_us in known.items() if since_us is not None and since_us < beat.heard_us and key not in live
    ]


class _Link:
    __slots__ = ("beat_us", "heard_us", "peer_said_us", "ready", "restored_us")

    def __init__(self, now_us: int) -> None:
        self.ready = False
        self.heard_us = now_us
        self.beat_us = now_us
        self.peer_said_us = 0
        """Of the peer's clock: its latest heartbeat."""
        self.restored_us: int | None = None
        """When the connection was made anew, until the peer has answered a heartbeat sent since."""


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

    def heard_beat(self, beat: Heartbeat) -> None:
        """After a new connection the first answer is answered at once: only then the peer has a list to go by."""
        link = self._links.get(beat.source)
        if link is None:
            return
        link.peer_said_us = max(link.peer_said_us, beat.said_us)
        if link.restored_us is not None and beat.heard_us >= link.restored_us:
            link.restored_us = None
            link.beat_us -= self._timing.heartbeat_us

    def restored(self, peer: InstanceRef, now_us: int) -> None:
        """Its connection broke and was made anew: lists are exchanged now."""
        link = self._links.get(peer)
        if link is not None:
            link.restored_us = now_us
            link.beat_us = now_us - self._timing.heartbeat_us

    def beat(self, source: InstanceRef, peer: InstanceRef, live: Sequence[AttemptRef], now_us: int) -> Heartbeat:
        link = self._links.get(peer)
        return Heartbeat(source, peer, list(live), now_us, 0 if link is None else link.peer_said_us)

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
