"""In which order attempts that wait for pages are started: longest cached prefix first, nobody passed over for long.

What has most of its prompt cached is done soonest and frees its pages soonest, and it uses blocks that may be evicted
while it waits. An attempt that PASSED_OVER_MAX later ones have overtaken goes next, whatever is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from prefill_worker.core.attempt import PrefillAttempt
from segue.block_hash import block_hashes
from segue.block_pool import BlockPool

PASSED_OVER_MAX = 8

WINDOW = 16
"""Attempts that are compared, in order of arrival: bounds what a step costs when many wait."""


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
