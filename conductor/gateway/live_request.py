"""One live request between the table that feeds it and the front that drains it."""

from __future__ import annotations

import asyncio

from conductor.gateway.hash_chain import HashChain
from conductor.gateway.session import Session
from conductor.gateway.session_events import Emit, End
from conductor.tenant_limits import Ticket
from segue.errors import InternalError, SegueError
from segue.plan import PromptScores, TokenLogprobs


class LiveRequest:
    """Merges what arrives between two reads into one Emit: a slow client gets larger pieces, never a longer queue.

    `wake` is set on every change; several requests (choices of one call) may share it.
    """

    def __init__(
        self, wire_id: str, session: Session, chain: HashChain, wake: asyncio.Event, ticket: Ticket | None
    ) -> None:
        self.wire_id = wire_id
        self.session = session
        self.chain = chain
        self.wake = wake
        self.ticket = ticket
        """Its place among its tenant's requests; None without limits."""
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at_us = 0
        self.replan: asyncio.TimerHandle | None = None
        self.emitted_us = 0
        self._only: Emit | None = None
        """What arrived, while it is one Emit; several are kept merged in the lists below."""
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._scores: PromptScores | None = None

    @property
    def request_id(self) -> str:
        return self.session.spec.request_id

    @property
    def end(self) -> End | None:
        """The terminal state; there may still be something to `take`."""
        return self.session.end

    def put(self, emit: Emit) -> None:
        if self._only is None and not self._texts:
            self._only = emit
            return
        if self._only is not None:
            only, self._only = self._only, None
            self._merge(only)
        self._merge(emit)

    def _merge(self, emit: Emit) -> None:
        self._token_ids += emit.token_ids
        self._texts.append(emit.text)
        self._scores = emit.scores or self._scores
        if emit.logprobs is not None:
            self._logprobs += emit.logprobs

    def take(self) -> Emit | None:
        """Everything since the last call, or None."""
        if self._only is not None:
            only, self._only = self._only, None
            return only
        if not self._texts:
            return None
        wants_logprobs = self.session.spec.sampling.logprobs is not None
        emit = Emit(self._token_ids, "".join(self._texts), self._logprobs if wants_logprobs else None, self._scores)
        self._token_ids, self._texts, self._logprobs, self._scores = [], [], [], None
        return emit

    async def next(self) -> Emit | None:
        """The next piece; None at a good end. Raises the error of any other end, after the last piece was taken.

        Only for requests that do not share their `wake`.
        """
        while True:
            emit = self.take()
            if emit is not None:
                return emit
            if self.end is not None:
                raise_for(self.end)
                return None
            await self.wake.wait()
            self.wake.clear()

    def disarm(self) -> None:
        for handle in (self.timer, self.replan):
            if handle is not None:
                handle.cancel()
        self.timer = self.replan = None


def raise_for(end: End) -> None:
    """Raise what the client has to be told, if the end was not a good one."""
    if end.error is None:
        return
    if isinstance(end.error, SegueError):
        raise end.error
    raise InternalError(str(end.error)) from end.error
