"""Continuous batching with chunked prefill, automatic prefix caching and preemption by recompute. Pure.

Every step has one token budget. Decodes take theirs first, oldest sequence first; what is left goes to prefill chunks,
then to sequences waiting for admission, in `order`.

Pages. At admission a sequence gets pages for all its known tokens: the published prefix it hits plus fresh ones; later
it grows by a page whenever a decode crosses a block boundary. A prompt that hits completely still recomputes its last
token; its K/V goes into a copy of the last block (copy-on-write), or, where no page is left for a copy, the block is
taken out of the cache and written in place, or recomputed as a whole. Blocks are hashed and published only when the
result that computed them has landed: of two sequences with the same new prefix in one step neither reads what the
other has not filled; both compute it, and the second copy stays private. A sequence whose prompt is to be scored
(`prompt_logprobs`) matches nothing until that is done: it needs the logits of every position, and pages hold none.

Progress. A sequence that needs a page preempts the youngest one, never one older than itself, and otherwise stalls: so
the oldest running sequence is never preempted and gets every page the others have. Where nothing at all can be planned,
the youngest gives way. A preempted sequence keeps every token it has sampled and waits in its old order. Nobody is
admitted in a step that preempts, and admission leaves some pages for growth, so that it does not bounce. Prefill-only
sequences own all they will need from the start and are never preempted: their pages may be on their way elsewhere.

In flight. Up to `pipeline_depth` + 1 plans are launched and not finished; see `sequence_table` for what outlives them.
At depth 1 the newest token of a row may be unknown when its next decode is planned; if it turns out to have ended the
sequence, what the next plan computes for it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from segue.block_pool import BlockPool
from segue.block_tables import BlockTables, shared_blocks
from segue.errors import InternalError, InvalidField
from segue.plan import BatchPlan, PlanResult
from segue.plan_draft import PlanDraft
from segue.plan_landing import PlanLanding
from segue.planner_records import PlannerCounts, PlannerLimits, Reservation, SeqUpdate
from segue.reservations import Reservations
from segue.sampling_params import SamplingParams
from segue.sequence import SeqState, Sequence, new_sequence
from segue.sequence_table import SequenceTable

__all__ = ["BatchPlanner", "PlannerCounts", "PlannerLimits", "Reservation", "SeqUpdate"]

HEADROOM_SEQS = 8
"""Admission leaves one page for every eight running sequences: with blocks of 16, two decode steps of growth."""

SIBLINGS_MAX = 16
"""Waiting sequences that may be passed over in one step because another computes their prefix: bounds its cost."""


class BatchPlanner:
    """One instance's scheduler. `pool` belongs to it alone; `eos_ids` end every sequence that does not ignore them."""

    def __init__(self, pool: BlockPool, limits: PlannerLimits, eos_ids: Iterable[int]) -> None:
        if min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.steps_max) < 1 or limits.pipeline_depth < 0:
            raise ValueError(f"impossible limits: {limits}")
        self._pool = pool
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._table = SequenceTable(pool, limits.max_num_seqs)
        self._blocks = BlockTables(pool)
        self._landing = PlanLanding(self._table, self._blocks)
        self._reservations = Reservations(pool)
        self._op_next = 1
        self._refused: Sequence | None = None
        """The waiting sequence that found too few pages, and how many it needs at least."""
        self._pages_wanted = 0
        self.tokens_max = min(limits.max_model_len, pool.pages_total * pool.block_size)
        """Longest sequence, prompt and generated tokens together: the model's maximum, if the pool can hold it."""

    # -- sequences come and go

    def add(
        self,
        seq: int,
        tokens: list[int],
        tokens_prompt: int,
        sampling: SamplingParams,
        hash_root: bytes,
        *,
        order: int,
        prefill_only: bool = False,
        hashes: Seq[bytes] = (),
    ) -> None:
        """Queue a sequence for admission, lowest `order` first. `tokens` are its prompt and what earlier attempts
        generated; `hashes` may name the chain over its full blocks if that is known already.

        A `prefill_only` sequence stops after its first sampled token and keeps its pages until `release`. Raises
        InvalidField when there is nothing to compute, or no room for even one more token.
        """
        record = self._new_sequence(seq, tokens, tokens_prompt, sampling, hash_root, order, hashes)
        if prefill_only:
            record.prefill_only = True
            record.tokens_limit = len(tokens) + 1
        self._table.insert_waiting(record)

    def reserve(self, seq: int, tokens_total: int, hashes: Seq[bytes]) -> Reservation | None:
        """Pages for `tokens_total` positions that another instance will fill, or None while there is no room.

        `hashes` is the chain over the full blocks; the block of the last position is never taken from the cache. While
        a sequence waits for pages nothing is reserved: newcomers must not starve it. Raises InvalidField when
        `tokens_total` could never fit.
        """
        if seq in self._reservations or seq in self._table.by_id:
            raise InternalError(f"sequence {seq} is known already")
        if not 0 < tokens_total < self.tokens_max:
            raise InvalidField("prompt", f"{tokens_total} tokens, this instance takes 1 to {self.tokens_max - 1}")
        if self._refused is not None and self._refused.state is SeqState.WAITING:
            return None
        return self._reservations.reserve(seq, tokens_total, hashes, self._headroom())

    def land(
        self,
        seq: int,
        tokens: list[int],
        tokens_prompt: int,
        sampling: SamplingParams,
        hash_root: bytes,
        reservation: Reservation,
        tokens_ready: int,
        *,
        order: int,
        hashes: Seq[bytes] = (),
    ) -> None:
        """Turn a reservation into a running sequence whose first `tokens_ready` positions have valid K/V.

        If that is all but the last token it decodes next, otherwise it computes the rest itself.
        """
        record = self._new_sequence(seq, tokens, tokens_prompt, sampling, hash_root, order, hashes)
        self._reservations.take(reservation)
        self._blocks.land(record, reservation.pages_cached, reservation.pages_new, tokens_ready)
        self._table.insert_running(record)

    def reservation_abort(self, reservation: Reservation, quarantine: bool) -> None:
        """Give a reservation up. With `quarantine` its new pages stay away until `pool.unquarantine`."""
        self._reservations.abort(reservation, quarantine)

    def cancel(self, seq: int) -> bool:
        """Forget a sequence in whatever state, and free all it owns once no plan in flight names it.

        False when it is not known (any more). Where its pages are still being sent elsewhere, `park` it first and
        `release` it when the transfer is over.
        """
        record = self._table.by_id.get(seq)
        if record is None:
            return False
        self._table.end(record)
        return True

    def park(self, seq: int) -> bool:
        """Stop computing a prefill-only sequence but keep its pages until `release`. False when it is not known."""
        record = self._table.by_id.get(seq)
        if record is None:
            return False
        if record.state is SeqState.RUNNING:
            self._table.park(record)
        elif record.state is not SeqState.PARKED:
            self._table.end(record)
        return True

    def release(self, seq: int) -> bool:
        """Let go of a parked sequence and its pages; for any other it is the same as `cancel`."""
        return self.cancel(seq)

    def _new_sequence(
        self,
        seq: int,
        tokens: list[int],
        tokens_prompt: int,
        sampling: SamplingParams,
        hash_root: bytes,
        order: int,
        hashes: Seq[bytes],
    ) -> Sequence:
        if seq in self._table.by_id:
            raise InternalError(f"sequence {seq} is known already")
        record = new_sequence(seq, tokens, tokens_prompt, sampling, hash_root, order, self.tokens_max)
        record.hashes = list(hashes[: len(tokens) // self._pool.block_size])
        if not sampling.ignore_eos:
            record.stop_ids |= self._eos_ids
        return record

    # -- planning

    def plan(self) -> BatchPlan | None:
        """The next unit of work, or None: nothing to do now, or as many plans in flight as may be."""
        if len(self._table.flights) > self._limits.pipeline_depth:
            return None
        draft = self._draft()
        while draft.is_empty and not self._table.flights and self._give_way():
            draft = self._draft()
        if draft.is_empty:
            return None
        if not draft.chunks and self._limits.steps_max > 1:
            self._extend_steps(draft)
        ends, self._table.rows_ended = self._table.rows_ended, []
        plan, flight = draft.launch(ends)
        self._table.flights.append(flight)
        self._op_next += 1
        return plan

    def _draft(self) -> PlanDraft:
        running = tuple(self._table.running)
        decodes_likely = sum(1 for seq in running if len(seq.tokens) + seq.pending - seq.scheduled == 1)
        oldest_prefills = bool(running) and running[0].remaining > 1
        budget = self._limits.max_num_batched_tokens
        saturating = self._limits.tokens_saturating
        draft = PlanDraft(self._op_next, budget, decodes_likely, oldest_prefills, saturating)
        preemptions = self._table.preemptions
        for seq in running:
            if seq.state is SeqState.RUNNING:
                self._draft_sequence(seq, draft)
        if self._table.preemptions == preemptions:
            self._admit(draft)
        return draft

    def _draft_sequence(self, seq: Sequence, draft: PlanDraft) -> None:
        """Add what a running sequence can do in this step, if budget, row and pages allow."""
        expected = len(seq.tokens) + seq.pending
        decodes = expected - seq.scheduled == 1
        if expected >= seq.tokens_limit or (draft.budget_decodes if decodes else draft.chunk_room) <= 0:
            return
        ready = seq.row is not None and expected <= len(seq.pages) * self._pool.block_size
        if not ready and not self._make_ready(seq, expected, draft):
            return
        if decodes:
            draft.add_decode(seq)
        else:
            draft.add_chunk(seq, min(expected - seq.scheduled, draft.chunk_room))

    def _make_ready(self, seq: Sequence, positions: int, draft: PlanDraft) -> bool:
        """Give a sequence a row, pages for `positions`, and a private page to write to."""
        missing = self._blocks.missing(seq, positions)
        if seq.row is not None:
            if missing and self._make_room(seq, missing):
                draft.grow(seq, self._blocks.grow(seq, missing))
                missing = 0
            return not missing
        if not self._table.rows_free:
            return False
        copy = self._blocks.must_copy(seq, missing)
        if not self._make_room(seq, missing + copy):
            return False
        if copy:
            draft.copies.append(self._blocks.copy_on_write(seq))
        self._blocks.grow(seq, missing)
        self._table.bind_row(seq)
        draft.starts.append(seq)
        return True

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Preempt younger sequences until `count` pages can be allocated; False if there are not enough (yet)."""
        while not self._pool.can_allocate(count):
            if self._pool.pages_allocatable + self._table.pages_coming() >= count:
                return False
            victim = self._table.youngest_preemptible(seq)
            if victim is None:
                return False
            self._table.preempt(victim)
        return True

    def _give_way(self) -> bool:
        """Nothing could be planned and nothing is in flight: the youngest running sequence makes room, if there is
        any but the oldest."""
        victim = self._table.youngest_preemptible(None)
        if victim is not None:
            self._table.preempt(victim)
        return victim is not None

    def _extend_steps(self, draft: PlanDraft) -> None:
        """Allow more steps where that needs no preemption; a row never runs past the longest sequence."""
        steps = min(self._limits.steps_max, max(seq.tokens_limit - seq.tokens_expected for seq in draft.decodes))
        steps = min(steps, *(self.tokens_max - seq.tokens_expected for seq in draft.decodes))
        if any(seq.prefill_only for seq in draft.decodes):
            steps = 1
        while steps > 1:
            missing = [self._blocks.missing(seq, seq.scheduled + steps) for seq in draft.decodes]
            if self._pool.can_allocate(sum(missing)):
                break
            steps //= 2
        if steps <= 1:
            return
        draft.steps = steps
        for seq, count in zip(draft.decodes, missing, strict=True):
            if count:
                draft.grow(seq, self._blocks.grow(seq, count))

    # -- admission

    def _admit(self, draft: PlanDraft) -> None:
        """Start waiting sequences, oldest first, until budget, rows or pages are used up."""
        index, table = 0, self._table
        while index < min(len(table.waiting), SIBLINGS_MAX) and table.rows_free and draft.budget > 0:
            seq = table.waiting[index]
            if draft.is_saturated or (seq is self._refused and self._pool.pages_allocatable < self._pages_wanted):
                return
            cached = self._blocks.match(seq)
            if self._is_worth_waiting(seq, len(cached)):
                index += 1
                continue
            self._pages_wanted = self._blocks.place(seq, cached, 0 if seq.prefill_only else self._headroom())
            self._refused = seq if self._pages_wanted else None
            if self._pages_wanted:
                return
            del table.waiting[index]
            table.insert_running(seq)
            draft.budget_chunks = draft.budget_decodes = draft.budget
            self._draft_sequence(seq, draft)

    def _is_worth_waiting(self, seq: Sequence, blocks_cached: int) -> bool:
        """Whether at least half of what a sequence would compute is being computed by another one right now: of a burst
        of siblings one computes the new prefix, the others read it a step later."""
        if seq.wants_scores:
            return False
        size = self._pool.block_size
        enough = max(size, (len(seq.tokens) - blocks_cached * size) // 2)
        for other in self._table.running:
            if other.row is not None and other.computed < len(other.tokens) - 1:
                shared = shared_blocks(seq.hashes, other.hashes)
                if other.computed < shared * size and (shared - blocks_cached) * size >= enough:
                    return True
        return False

    def _headroom(self) -> int:
        return -(-len(self._table.running) // HEADROOM_SEQS)

    # -- results

    def finished(self, result: PlanResult) -> list[SeqUpdate]:
        """Take in the result of the oldest plan in flight; what changed, sequence by sequence."""
        flights = self._table.flights
        if not flights or flights[0].op != result.op:
            raise InternalError(f"result of plan {result.op}, which is not the oldest in flight")
        return self._landing.land(flights.popleft(), result)

    # -- what others are told

    def pages(self, seq: int) -> list[int]:
        """The block table of a sequence, front to back; empty while it waits. Raises KeyError when it is not known."""
        return list(self._table.by_id[seq].pages)

    def knows(self, seq: int) -> bool:
        """Whether the sequence waits, runs or is parked."""
        return seq in self._table.by_id

    def has_work(self) -> bool:
        """Whether anything runs, waits or is in flight (parked sequences and reservations are not work)."""
        return bool(self._table.running or self._table.waiting or self._table.flights)

    def counts(self) -> PlannerCounts:
        running, waiting = self._table.running, self._table.waiting
        preempting = sum(1 for seq in self._table.by_id.values() if seq.state is SeqState.PREEMPTING)
        prefills = sum(seq.remaining for seq in running if seq.remaining > 1)
        return PlannerCounts(
            running=len(running),
            waiting=len(waiting) + preempting,
            tokens_queued=prefills + sum(self._uncached(seq) for seq in waiting),
            tokens_running=sum(seq.computed for seq in running),
            preemptions=self._table.preemptions,
        )

    def _uncached(self, seq: Sequence) -> int:
        """What a waiting sequence would compute if it were admitted now."""
        return max(1, len(seq.tokens) - len(self._blocks.match(seq)) * self._pool.block_size)

    def check(self) -> None:
        """Raise InternalError where an invariant of the pool or of the queues is broken. O(everything)."""
        self._table.check()
        tables = [seq.pages for seq in self._table.by_id.values()]
        self._pool.check(tables + self._reservations.tables())
