"""In which order attempts that wait for pages are started: longest cached prefix first, nobody passed over for long.

What has most of its prompt cached is done soonest and frees its pages soonest, and it uses blocks that may be evicted
while it waits. An attempt that PASSED_OVER_MAX later ones have overtaken goes next, whatever is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from prefill_worker.core.attempt import PrefillAttempt
from segue.block_hash import block_hashes
from segue.block_pool import BlockPool
from segue.handoff import PrefillState
from segue.handoff_links import PeerLinks
from segue.ids import InstanceRef

PASSED_OVER_MAX = 8

WINDOW = 16
"""Attempts that are compared, in order of arrival: bounds what a step costs when many wait."""


class AskingTurn(NamedTuple):
    """One look at who is to ask now: attempts ask while less than one chunk of work stands before them.

    Attempts that wait for one D's memory do not count against another D's, and one that D has not answered soon does
    not keep those behind it from asking: its Assign may have been lost on the way to D."""

    now_us: int
    repeat_us: int
    tokens_chunk: int

    def choose(self, attempts: Iterable[PrefillAttempt], links: PeerLinks, pool: BlockPool) -> list[PrefillAttempt]:
        """Those that ask, in this order; they count as having asked."""
        granted, ahead, waiting = self._tally(attempts, links)
        asking: list[PrefillAttempt] = []
        while granted < self.tokens_chunk:
            able = (each for each in waiting if granted + ahead[each.peer] < self.tokens_chunk)
            chosen = next_to_ask(able, pool)
            if chosen is None:
                break
            waiting.remove(chosen)
            asking.append(chosen)
            chosen.asked_first_us = self.now_us
            ahead[chosen.peer] += len(chosen.tokens)
        return asking

    def _tally(
        self, attempts: Iterable[PrefillAttempt], links: PeerLinks
    ) -> tuple[int, Counter[InstanceRef], list[PrefillAttempt]]:
        """Tokens granted and not computed, tokens asked for by peer, and who could ask."""
        granted, ahead, waiting = 0, Counter[InstanceRef](), []
        for attempt in attempts:
            if attempt.state in (PrefillState.COMPUTING, PrefillState.SENDING):
                granted += attempt.tokens_left
            elif attempt.state is not PrefillState.PLANNED or not links.is_ready(attempt.peer):
                continue
            elif attempt.asked_first_us is None:
                waiting.append(attempt)
            elif self.now_us - attempt.asked_first_us < self.repeat_us:
                ahead[attempt.peer] += len(attempt.tokens)
        return granted, ahead, waiting


def next_to_ask(waiting: Iterable[PrefillAttempt], pool: BlockPool) -> PrefillAttempt | None:
    """Of those that wait, in order of arrival; the ones it overtakes remember it."""
    seen = list(islice(waiting, WINDOW))
    if not seen:
        return None
    late = next((attempt for attempt in seen if attempt.passed_over >= PASSED_OVER_MAX), None)
    chosen = late or max(seen, key=lambda attempt: blocks_cached(attempt, pool))  # the first of equals
    for attempt in seen[: seen.index(chosen)]:
        attempt.passed_over += 1
    return chosen


def blocks_cached(attempt: PrefillAttempt, pool: BlockPool) -> int:
    """Leading blocks of the prompt that the pool holds now; none for a prompt whose positions are all to be scored."""
    if attempt.assign.sampling.prompt_logprobs is not None:
        return 0
    if attempt.hashes is None:
        attempt.hashes = block_hashes(attempt.assign.hash_root, attempt.assign.token_ids, pool.block_size)
    return len(pool.match(attempt.hashes))


def tokens_uncached(attempt: PrefillAttempt, pool: BlockPool) -> int:
    """What a prefill that began now would compute."""
    return max(1, len(attempt.tokens) - blocks_cached(attempt, pool) * pool.block_size)
