"""What carries out each kind of decision. Effects may post events; they never call the core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvstore.connectors.base import Mover, MoverError
from kvstore.events_zmq import EventPublisher
from worker_runtime import events as ev
from worker_runtime.engine_thread import EngineThread
from worker_runtime.peer_connections import PeerConnections
from worker_runtime.rpc_control import ConductorLink
from worker_runtime.rpc_tokens import TokenStreams

log = logging.getLogger(__name__)


class Effects:
    """The edge of one worker, as a table from decision to effect."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        mover: Mover,
        peers: PeerConnections,
        tokens: TokenStreams,
        conductors: dict[str, ConductorLink],
        publisher: EventPublisher,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._peers = peers
        self._tokens = tokens
        self._conductors = conductors
        self._publisher = publisher
        self._post = post
        self.needs_restart = False

    def table(self) -> dict[type, Callable[[Any], None]]:
        return {
            ev.RunPlan: lambda decision: self._engine.submit(decision.plan),
            ev.MovePages: lambda decision: self._move(decision),
            ev.CancelMove: lambda decision: self._mover.cancel(decision.op),
            ev.LendPages: self._lend,
            ev.OpenLink: lambda decision: self._peers.open(decision.peer),
            ev.SendPeer: self._send,
            ev.PushTokens: lambda decision: self._tokens.push(decision.gateway, decision.deltas),
            ev.PublishKv: lambda decision: self._publisher.publish_kv(decision.events),
            ev.Report: self._report,
            ev.Fence: self._fence,
            ev.RestartNeeded: self._restart,
        }

    def collect_moves(self) -> None:
        """Hand finished moves to the core."""
        for done in self._mover.poll():
            self._post(ev.PagesMoved(done.op, done.moved, done.error))

    def _report(self, decision: ev.Report) -> None:
        link = self._conductors.get(decision.conductor)
        if link is not None:
            link.report(decision.outcome)

    def _move(self, decision: ev.MovePages) -> None:
        self._mover.send(decision.op, decision.target, decision.attempt, decision.pages)

    def _lend(self, decision: ev.LendPages) -> None:
        """A source that the mover does not know (its process ended just now, or it never met us) cannot write here."""
        try:
            self._mover.receive(decision.source, decision.attempt, decision.pages)
        except MoverError as error:
            log.warning("pages lent to nobody: %s", error)
            self._post(ev.PeerGone(decision.source))

    def _send(self, decision: ev.SendPeer) -> None:
        """A dropped message is counted by the channel; the core repeats what matters."""
        self._peers.channel.send(decision.message, decision.message.target)

    def _fence(self, decision: ev.Fence) -> None:
        self._post(ev.Fenced(decision.op, decision.peer, self._mover.fence(decision.peer, decision.attempt)))

    def _restart(self, decision: ev.RestartNeeded) -> None:
        log.error("this instance must be replaced: %s", decision.reason)
        self.needs_restart = True
