"""Finished pages on their way to D: which blocks go, and which source pages must outlive what.

A page named by an outstanding move carries an extra held reference: neither preemption nor cancel can let it be
overwritten while the mover reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefill_worker.core.attempt import PrefillAttempt
from segue.block_pool import BlockPool
from worker_runtime.events import CancelMove, MovePages, PagesMoved


class PageSender:
    """Outstanding moves of all attempts. Every op ends with exactly one PagesMoved."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_op: dict[int, PrefillAttempt] = {}
        self._op_next = 1

    def hand_over(self, attempt: PrefillAttempt, table: Sequence[int], blocks_ready: int) -> MovePages:
        """Start moving the blocks from `attempt.blocks_handed` to `blocks_ready` of the block table."""
        first = attempt.blocks_handed
        sources = list(table[first:blocks_ready])
        targets = attempt.pages_target[first - attempt.first_block : blocks_ready - attempt.first_block]
        self._pool.acquire(sources)
        self._pool.hold(sources)
        op, self._op_next = self._op_next, self._op_next + 1
        attempt.moves[op] = (first, sources)
        attempt.blocks_handed = blocks_ready
        self._by_op[op] = attempt
        return MovePages(op, attempt.peer, list(zip(sources, targets, strict=True)), attempt.key)

    def finish(self, event: PagesMoved) -> tuple[PrefillAttempt, int, int] | None:
        """(attempt, first block, blocks) of an op whose pages may be reused now; None for an unknown or repeated op.

        A failed page makes that block and all later ones of the attempt invalid."""
        attempt = self._by_op.pop(event.op, None)
        if attempt is None:
            return None
        first, sources = attempt.moves.pop(event.op)
        self._pool.unhold(sources)
        self._pool.release(sources)
        if event.moved < len(sources):
            failed = first + event.moved
            attempt.blocks_failed = failed if attempt.blocks_failed is None else min(attempt.blocks_failed, failed)
        return attempt, first, event.moved

    def cancel(self, attempt: PrefillAttempt) -> list[CancelMove]:
        return [CancelMove(op) for op in attempt.moves]
