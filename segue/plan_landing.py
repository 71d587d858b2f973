"""What a plan's result does to its sequences: tokens appended up to the one that ends them, blocks published.

Results of sequences that ended or were parked meanwhile are dropped; a preempted one keeps its newest token.
"""

from __future__ import annotations

from msgspec.structs import replace

from segue.block_tables import BlockTables
from segue.errors import InternalError
from segue.plan import PlanResult, RowTokens
from segue.plan_draft import PlanInFlight
from segue.planner_records import SeqUpdate
from segue.sequence import SeqState, Sequence
from segue.sequence_table import SequenceTable

_LIVE = (SeqState.RUNNING, SeqState.PREEMPTING)


class PlanLanding:
    def __init__(self, table: SequenceTable, blocks: BlockTables) -> None:
        self._table = table
        self._blocks = blocks

    def land(self, flight: PlanInFlight, result: PlanResult) -> list[SeqUpdate]:
        """Apply the result of `flight`, which is no longer among the plans in flight."""
        rows = {row.seq: row for row in result.rows}
        scores = {entry.seq: entry.scores for entry in result.scores}
        updates = []
        for seq, end, sample in flight.chunks:
            seq.pending -= int(sample)
            if seq.state in _LIVE:
                seq.computed = end
                seq.scored(end)
                update = self._sampled(seq, rows, 1) if sample else self._advanced(seq)
                updates.append(replace(update, scores=scores[seq.seq]) if seq.seq in scores else update)
        for seq in flight.decodes:
            seq.pending -= flight.steps
            if seq.state in _LIVE:
                seq.scheduled -= flight.steps - result.steps
                updates.append(self._sampled(seq, rows, result.steps))
        self._table.landed(flight)
        return updates

    def _advanced(self, seq: Sequence) -> SeqUpdate:
        self._blocks.publish(seq, seq.computed)
        return SeqUpdate(seq.seq, seq.computed, [], None, "", "", seq.tokens_cached or 0)

    def _sampled(self, seq: Sequence, rows: dict[int, RowTokens], steps: int) -> SeqUpdate:
        row = rows.get(seq.seq)
        if row is None or (row.error is None and len(row.tokens) != steps):
            raise InternalError(f"the result has no {steps} tokens for sequence {seq.seq}: {row}")
        if row.error is not None:
            return self._failed(seq, row.error)
        tokens, logprobs = row.tokens, row.logprobs
        count, finish = seq.extend(tokens)
        if count < len(tokens):
            tokens = tokens[:count]
            logprobs = logprobs and logprobs[:count]
        seq.computed = len(seq.tokens) - 1
        self._blocks.publish(seq, seq.computed)
        if finish or seq.prefill_only:
            self._leave(seq)
        return SeqUpdate(seq.seq, seq.computed, tokens, logprobs, finish, "", seq.tokens_cached or 0)

    def _failed(self, seq: Sequence, error: str) -> SeqUpdate:
        """Only this sequence ends. What it read and wrote is suspect and leaves the cache, or it would fail others."""
        self._blocks.forget(seq)
        self._leave(seq)
        return SeqUpdate(seq.seq, seq.computed, [], None, "error", error, seq.tokens_cached or 0)

    def _leave(self, seq: Sequence) -> None:
        if seq.prefill_only:
            self._table.park(seq)
        else:
            self._table.end(seq)
