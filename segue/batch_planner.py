"""Continuous batching with chunked prefill, automatic prefix caching and preemption by recompute. Pure.

Every step has one token budget. Decodes take theirs first, oldest sequence first; what is left goes to prefill chunks,
then to sequences waiting for admission, in `order`.

Pages. At admission a sequence gets pages for all its known tokens: the published prefix it hits plus fresh ones; later
it grows by a page whenever a decode crosses a block boundary. A prompt that hits completely still recomputes its last
token; its K/V goes into a copy of the last block (copy-on-write), or, where no page is left for a copy, the block is
taken out of the cache and written in place, or recomputed as a whole. Blocks are hashed and published only when the
result that computed them has landed: of two sequences with the same new prefix in one step neither reads what the
other has not filled; both compute it, and the second copy stays private.

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

from segue.block_hash import block_hash, token_bytes
from segue.block_pool import BlockPool
from segue.errors import InternalError, InvalidField
from segue.plan import BatchPlan, PlanResult, RowTokens
from segue.plan_draft import PlanDraft
from segue.planner_records import PlannerCounts, PlannerLimits, Reservation, SeqUpdate
from segue.sampling_params import SamplingParams
from segue.sequence import SeqState, Sequence
from segue.sequence_table import SequenceTable

__all__ = ["BatchPlanner", "PlannerCounts", "PlannerLimits", "Reservation", "SeqUpdate"]

HEADROOM_SEQS = 8
"""Admission leaves one page for every eight running sequences: with blocks of 16, two decode steps of growth."""


class BatchPlanner:
    """One instance's scheduler. `pool` belongs to it alone; `eos_ids` end every sequence that does not ignore them."""

    def __init__(self, pool: BlockPool, limits: PlannerLimits, eos_ids: Iterable[int]) -> None:
        if min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.steps_max) < 1 or limits.pipeline_depth < 0:
            raise ValueError(f"impossible limits: {limits}")
        self._pool = pool
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._table = SequenceTable(pool, limits.max_num_seqs)
        self._reservations: dict[int, Reservation] = {}
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
        size = self._pool.block_size
        cached = self._pool.match(hashes[: (tokens_total - 1) // size])
        count = _blocks(tokens_total, size) - len(cached)
        starving = self._refused is not None and self._refused.state is SeqState.WAITING
        if starving or not self._pool.can_allocate(count + self._headroom(), cached):
            return None
        self._pool.acquire(cached)
        new = self._pool.allocate(count)
        self._pool.hold(new)
        reservation = Reservation(cached, new, seq)
        self._reservations[seq] = reservation
        return reservation

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
        self._take_reservation(reservation)
        self._pool.unhold(reservation.pages_new)
        record.pages = reservation.pages_cached + reservation.pages_new
        size = self._pool.block_size
        ready = min(tokens_ready, len(tokens), len(record.pages) * size)
        record.scheduled = record.computed = min(ready, len(tokens) - 1)
        record.blocks_published = len(reservation.pages_cached)
        record.tokens_cached = min(record.blocks_published * size, tokens_prompt)
        self._table.insert_running(record)
        self._publish(record, ready)

    def reservation_abort(self, reservation: Reservation, quarantine: bool) -> None:
        """Give a reservation up. With `quarantine` its new pages stay away until `pool.unquarantine`."""
        self._take_reservation(reservation)
        self._pool.release(reservation.pages_cached)
        if quarantine:
            self._pool.quarantine(reservation.pages_new)
        else:
            self._pool.unhold(reservation.pages_new)
            self._pool.release(reservation.pages_new)

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

    def _take_reservation(self, reservation: Reservation) -> None:
        if self._reservations.get(reservation.seq) is not reservation:
            raise InternalError(f"the reservation of sequence {reservation.seq} is not open")
        del self._reservations[reservation.seq]

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
        if not 0 < tokens_prompt <= len(tokens):
            raise InvalidField("prompt", f"{tokens_prompt} prompt tokens of {len(tokens)}")
        if len(tokens) >= self.tokens_max:
            raise InvalidField("prompt", f"{len(tokens)} tokens, this instance takes at most {self.tokens_max - 1}")
        limit = min(tokens_prompt + sampling.max_tokens, self.tokens_max)
        if len(tokens) >= limit:
            raise InvalidField("max_tokens", f"{sampling.max_tokens} leaves nothing to generate")
        stop_ids = frozenset(sampling.stop_token_ids)
        return Sequence(
            seq,
            list(tokens),
            tokens_prompt,
            sampling,
            hash_root,
            order=order,
            tokens_limit=limit,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            hashes=list(hashes[: len(tokens) // self._pool.block_size]),
        )

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
        decodes_likely = sum(1 for seq in running if seq.remaining == 1)
        oldest_prefills = bool(running) and running[0].remaining > 1
        budget = self._limits.max_num_batched_tokens
        draft = PlanDraft(self._op_next, budget, decodes_likely, oldest_prefills)
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
        if expected >= seq.tokens_limit:
            return
        if expected - seq.scheduled == 1:
            if draft.budget_decodes > 0 and self._make_ready(seq, expected, draft):
                draft.add_decode(seq)
        elif draft.budget_chunks > 0 and self._make_ready(seq, expected, draft):
            draft.add_chunk(seq, min(expected - seq.scheduled, draft.budget_chunks))

    def _make_ready(self, seq: Sequence, positions: int, draft: PlanDraft) -> bool:
        """Give a sequence a row, pages for `positions`, and a private page to write to."""
        missing = _blocks(positions, self._pool.block_size) - len(seq.pages)
        if seq.row is not None and missing <= 0:
            return True
        if seq.row is None and not self._table.rows_free:
            return False
        copy = seq.row is None and self._must_copy(seq, missing)
        if not self._make_room(seq, max(missing, 0) + copy):
            return False
        if copy:
            self._copy_on_write(seq, draft)
        if missing > 0:
            pages = self._pool.allocate(missing)
            seq.pages.extend(pages)
            if seq.row is not None:
                draft.grow(seq, pages)
        if seq.row is None:
            self._table.bind_row(seq)
            draft.starts.append(seq)
        return True

    def _must_copy(self, seq: Sequence, missing: int) -> bool:
        """Whether the first position to be written lies in a shared page that has to be copied before.

        If there is no room for a copy and nobody else reads the page, it leaves the cache and is written in place.
        """
        block = seq.scheduled // self._pool.block_size
        if block >= len(seq.pages) or not self._pool.is_shared(seq.pages[block]):
            return False
        if self._pool.can_allocate(max(missing, 0) + 1) or self._pool.references(seq.pages[block]) > 1:
            return True
        self._pool.unpublish(seq.pages[block])
        seq.blocks_published = block
        return False

    def _copy_on_write(self, seq: Sequence, draft: PlanDraft) -> None:
        block = seq.scheduled // self._pool.block_size
        source = seq.pages[block]
        (target,) = self._pool.allocate(1)
        seq.pages[block] = target
        self._pool.hold([source])
        draft.copies.append((source, target))

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
        size = self._pool.block_size
        while steps > 1:
            missing = [max(0, _blocks(seq.scheduled + steps, size) - len(seq.pages)) for seq in draft.decodes]
            if self._pool.can_allocate(sum(missing)):
                break
            steps //= 2
        if steps <= 1:
            return
        draft.steps = steps
        for seq, count in zip(draft.decodes, missing, strict=True):
            if count:
                pages = self._pool.allocate(count)
                seq.pages.extend(pages)
                draft.grow(seq, pages)

    # -- admission

    def _admit(self, draft: PlanDraft) -> None:
        table = self._table
        while table.waiting and table.rows_free and draft.budget > 0:
            seq = table.waiting[0]
            if not self._place(seq):
                return
            del table.waiting[0]
            table.insert_running(seq)
            draft.budget_chunks = draft.budget_decodes = draft.budget
            self._draft_sequence(seq, draft)

    def _place(self, seq: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and fresh pages for the rest of its known tokens."""
        if seq is self._refused and self._pool.pages_allocatable < self._pages_wanted:
            return False
        size, known = self._pool.block_size, len(seq.tokens)
        cached = self._pool.match(self._hash_blocks(seq, known // size))
        copies = int(len(cached) * size == known)
        spare = 0 if seq.prefill_only else self._headroom()
        count = _blocks(known, size) - len(cached)
        if copies and not self._pool.can_allocate(count + copies + spare, cached):
            cached, count, copies = cached[:-1], count + 1, 0
        if not self._pool.can_allocate(count + copies + spare, cached):
            self._refused, self._pages_wanted = seq, count + copies + spare
            return False
        self._refused = None
        self._pool.acquire(cached)
        seq.pages = cached + self._pool.allocate(count)
        seq.scheduled = seq.computed = min(len(cached) * size, known - 1)
        seq.blocks_published = len(cached)
        if seq.tokens_cached is None:
            seq.tokens_cached = min(seq.computed, seq.tokens_prompt)
        return True

    def _headroom(self) -> int:
        running = len(self._table.running)
        return -(-running // HEADROOM_SEQS)

    # -- results

    def finished(self, result: PlanResult) -> list[SeqUpdate]:
        """Take in the result of the oldest plan in flight; what changed, sequence by sequence."""
        flights = self._table.flights
        if not flights or flights[0].op != result.op:
            raise InternalError(f"result of plan {result.op}, which is not the oldest in flight")
        flight = flights.popleft()
        rows = {row.seq: row for row in result.rows}
        updates = []
        for seq, end, sample in flight.chunks:
            seq.pending -= int(sample)
            if seq.state in _LIVE:
                seq.computed = end
                updates.append(self._tokens_landed(seq, rows[seq.seq]) if sample else self._chunk_landed(seq))
        for seq in flight.decodes:
            seq.pending -= flight.steps
            if seq.state in _LIVE:
                row = rows[seq.seq]
                seq.scheduled -= flight.steps - len(row.tokens)
                updates.append(self._tokens_landed(seq, row))
        self._table.landed(flight)
        return updates

    def _chunk_landed(self, seq: Sequence) -> SeqUpdate:
        self._publish(seq, seq.computed)
        return SeqUpdate(seq.seq, seq.computed, [], None, "", "", seq.tokens_cached or 0)

    def _tokens_landed(self, seq: Sequence, row: RowTokens) -> SeqUpdate:
        """Append sampled tokens up to the one that ends the sequence, and let it go if there is one."""
        if row.error is not None:
            return self._failed(seq, row.error)
        taken, finish = 0, ""
        for token in row.tokens:
            seq.tokens.append(token)
            taken += 1
            finish = seq.finish_reason(self.tokens_max)
            if finish:
                break
        seq.computed = len(seq.tokens) - 1
        if seq.computed // self._pool.block_size > seq.blocks_published:
            self._publish(seq, seq.computed)
        logprobs = None if row.logprobs is None else row.logprobs[:taken]
        update = SeqUpdate(seq.seq, seq.computed, row.tokens[:taken], logprobs, finish, "", seq.tokens_cached or 0)
        if seq.prefill_only:
            self._table.park(seq)
        elif finish:
            self._table.end(seq)
        return update

    def _failed(self, seq: Sequence, error: str) -> SeqUpdate:
        """Only this sequence ends. What it read and wrote is suspect and leaves the cache, or it would fail others."""
        for page in seq.pages:
            self._pool.unpublish(page)
        update = SeqUpdate(seq.seq, seq.computed, [], None, "error", error, seq.tokens_cached or 0)
        if seq.prefill_only:
            self._table.park(seq)
        else:
            self._table.end(seq)
        return update

    # -- block hashes

    def _hash_blocks(self, seq: Sequence, count: int) -> list[bytes]:
        """The hashes of the first `count` blocks, all of final tokens; none without caching."""
        if not self._pool.caching:
            return []
        size, hashes = self._pool.block_size, seq.hashes
        for block in range(len(hashes), count):
            parent = hashes[-1] if hashes else seq.hash_root
            hashes.append(block_hash(parent, token_bytes(seq.tokens[block * size : (block + 1) * size])))
        return hashes

    def _publish(self, seq: Sequence, positions: int) -> None:
        """Publish the blocks that lie wholly in the first `positions`, whose K/V is final."""
        count = positions // self._pool.block_size
        hashes = self._hash_blocks(seq, count)
        if not hashes:
            return
        for block in range(seq.blocks_published, count):
            self._pool.publish(seq.pages[block], hashes[block], hashes[block - 1] if block else b"")
        seq.blocks_published = max(seq.blocks_published, count)

    # -- what others are told

    def pages(self, seq: int) -> list[int]:
        """The block table of a sequence, front to back; empty while it waits. Raises KeyError when it is not known."""
        return list(self._table.by_id[seq].pages)

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
            tokens_queued=prefills + sum(len(seq.tokens) for seq in waiting),
            tokens_running=sum(seq.computed for seq in running),
            preemptions=self._table.preemptions,
        )

    def check(self) -> None:
        """Raise InternalError where an invariant of the pool or of the queues is broken. O(everything)."""
        self._table.check()
        tables = [seq.pages for seq in self._table.by_id.values()]
        tables += [reservation.pages_cached for reservation in self._reservations.values()]
        self._pool.check(tables)


_LIVE = (SeqState.RUNNING, SeqState.PREEMPTING)


def _blocks(positions: int, block_size: int) -> int:
    return -(-positions // block_size)
