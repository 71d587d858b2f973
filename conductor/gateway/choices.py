"""The choices of one call: several live requests (prompts x `n`) that share one wake-up and one fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from conductor.gateway.intake import Call, Intake, choice_seed
from conductor.gateway.live_request import LiveRequest, raise_for
from conductor.gateway.model_catalog import UsableModel
from conductor.gateway.request_fields import CheckedRequest, with_sampling
from conductor.gateway.request_table import RequestTable
from conductor.gateway.session_events import Emit, End, Summary
from segue.errors import RequestError


class ChoicePiece(msgspec.Struct, frozen=True, gc=False):
    index: int
    emit: Emit | None
    end: End | None


class Choices:
    """Indices follow OpenAI's order: all choices of the first prompt, then those of the second. The first choice of a
    prompt brings the prompt's log-probabilities, where asked for, and the others wait for them."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._wake = asyncio.Event()
        self._lives: list[LiveRequest] = []
        self._per_prompt = 1

    async def open(
        self, intake: Intake, model: UsableModel, call: Call, prompts: Sequence[CheckedRequest], n: int
    ) -> None:
        """All or none: an error of one ends those that were opened before."""
        intake.check_choices(len(prompts) * n)
        single = len(prompts) * n == 1
        self._per_prompt = n
        try:
            for prompt in prompts:
                for choice in range(n):
                    index = len(self._lives)
                    request_id = call.request_id if single else f"{call.request_id}-{index}"
                    seed = choice_seed(prompt.sampling.seed, choice)
                    scores = prompt.sampling.prompt_logprobs if choice == 0 else None
                    checked = with_sampling(prompt, seed=seed, prompt_logprobs=scores)
                    own_call = msgspec.structs.replace(call, request_id=request_id, tokens_free=choice > 0)
                    self._lives.append(await intake.open(model, own_call, checked, self._wake))
        except RequestError as error:
            self.stop(error)
            raise

    async def pieces(self) -> AsyncIterator[list[ChoicePiece]]:
        """What is new, all choices together. Raises the error of the first choice that ends badly."""
        running = dict(enumerate(self._lives))
        followers = self._followers()
        while running:
            ready = []
            for index, live in tuple(running.items()):
                if index in followers and followers[index].session.scores_due:
                    continue
                emit, end = live.take(), live.end
                if emit is not None or end is not None:
                    ready.append(ChoicePiece(index, emit, end))
                if end is not None:
                    del running[index]
            if ready:
                yield ready
                for piece in ready:
                    if piece.end is not None:
                        raise_for(piece.end)
            else:
                await self._wake.wait()
                self._wake.clear()

    def _followers(self) -> dict[int, LiveRequest]:
        """Choices that wait for the prompt's log-probabilities -> the choice that brings them."""
        n = self._per_prompt
        firsts = ((index, self._lives[index - index % n]) for index in range(len(self._lives)) if index % n)
        return {index: first for index, first in firsts if first.session.scores_due}

    def summaries(self) -> list[Summary]:
        return [live.session.summary() for live in self._lives]

    def stop(self, error: RequestError) -> None:
        """End what still runs; without effect when all have ended."""
        for live in self._lives:
            self._table.stop(live, error)
