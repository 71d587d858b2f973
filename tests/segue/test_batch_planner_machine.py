"""The planner under random traffic, against an engine that notices every K/V slot that is not what it should be."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_fake_engine import next_token, prefix_digests, reference_tokens
from planner_harness import ROOT, Output, PlannerHarness

from segue.planner_records import Reservation
from segue.sampling_params import SamplingParams

TRUNK = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = st.builds(
    lambda shared, own: TRUNK[:shared] + own, st.integers(1, 12), st.lists(st.integers(0, 1), max_size=3)
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 20]),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), tuple(range(0, 50, 7))]),
)
SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class PlannerMachine(RuleBasedStateMachine):
    """Local sequences, sequences handed in (reserve, land) and handed out (prefill-only), cancels and errors."""

    depth = 0
    steps_max = 1

    @initialize(
        pages=st.integers(5, 12),
        seqs=st.integers(1, 4),
        budget=st.sampled_from([1, 2, 5, 16]),
        saturating=st.sampled_from([0, 1, 3]),
        caching=st.booleans(),
    )
    def start(self, pages: int, seqs: int, budget: int, saturating: int, caching: bool) -> None:
        self.harness = PlannerHarness(
            pages=pages,
            seqs=seqs,
            budget=budget,
            saturating=saturating,
            caching=caching,
            depth=self.depth,
            steps=self.steps_max,
            model_len=24,
        )
        self.next_seq = 0
        self.orders: dict[int, int] = {}
        self.local: set[int] = set()
        self.handed_out: set[int] = set()
        self.failing: set[int] = set()
        self.open: list[tuple[int, list[int], SamplingParams, Reservation]] = []
        self.quarantined: list[int] = []

    def new(self, prompt: list[int], sampling: SamplingParams) -> int:
        self.next_seq += 1
        self.harness.outputs[self.next_seq] = Output(prompt, sampling)
        return self.next_seq

    def drop(self, seq: int) -> None:
        self.harness.outputs[seq].finish = "cancelled"
        self.local.discard(seq)
        self.handed_out.discard(seq)

    @precondition(lambda self: len(self.harness.outputs) < 12)
    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def add(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.add_any(prompt, sampling, False)

    @precondition(lambda self: len(self.harness.outputs) < 12)
    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def add_prefill_only(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.add_any(prompt, sampling, True)

    def add_any(self, prompt: list[int], sampling: SamplingParams, prefill_only: bool) -> None:
        if len(prompt) >= self.harness.planner.tokens_max:
            return
        seq = self.new(prompt, sampling)
        self.orders[seq] = -seq if seq % 4 == 0 else seq
        self.harness.planner.add(
            seq, prompt, len(prompt), sampling, ROOT, order=self.orders[seq], prefill_only=prefill_only
        )
        (self.handed_out if prefill_only else self.local).add(seq)

    @precondition(lambda self: len(self.open) < 2 and len(self.harness.outputs) < 12)
    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def reserve(self, prompt: list[int], sampling: SamplingParams) -> None:
        harness = self.harness
        if len(prompt) + 1 >= harness.planner.tokens_max or sampling.max_tokens == 1:
            return
        seq = self.next_seq + 1
        reservation = harness.planner.reserve(seq, len(prompt), harness.hashes(prompt))
        if reservation is not None:
            self.new(prompt, sampling)
            self.open.append((seq, prompt, sampling, reservation))

    @precondition(lambda self: self.open)
    @rule(lost=st.integers(0, 6), local_prefill=st.booleans())
    def land(self, lost: int, local_prefill: bool) -> None:
        """The last `lost` positions did not arrive; with `local_prefill` the first token was not sampled elsewhere."""
        seq, prompt, sampling, reservation = self.open.pop(0)
        planner, size = self.harness.planner, self.harness.pool.block_size
        cached = len(reservation.pages_cached) * size
        ready = max(cached, len(prompt) - lost)
        self.harness.engine.write_remote(reservation.pages_cached + reservation.pages_new, prompt, range(cached, ready))
        first = [] if local_prefill else reference_tokens(prompt, 1)
        if first and self.harness.expected(seq)[0] == first:
            planner.reservation_abort(reservation, quarantine=False)
            self.drop(seq)
            return
        self.harness.outputs[seq].tokens += first
        self.orders[seq] = seq
        planner.land(seq, prompt + first, len(prompt), sampling, ROOT, reservation, ready, order=seq)
        self.local.add(seq)

    @precondition(lambda self: self.open)
    @rule(quarantine=st.booleans())
    def abort(self, quarantine: bool) -> None:
        seq, _, _, reservation = self.open.pop(0)
        self.harness.planner.reservation_abort(reservation, quarantine)
        self.drop(seq)
        if quarantine:
            self.quarantined += reservation.pages_new

    @precondition(lambda self: self.quarantined)
    @rule()
    def late_write_then_fence(self) -> None:
        garbage = [40] * len(self.quarantined) * 4
        self.harness.engine.write_remote(self.quarantined, garbage, range(len(garbage)))
        self.harness.pool.unquarantine(self.quarantined)
        self.quarantined = []

    @precondition(lambda self: self.open)
    @rule()
    def partial_write(self) -> None:
        _, prompt, _, reservation = self.open[0]
        start = len(reservation.pages_cached) * self.harness.pool.block_size
        pages = reservation.pages_cached + reservation.pages_new
        self.harness.engine.write_remote(pages, prompt, range(start, len(prompt)))

    @precondition(lambda self: self.local or self.handed_out)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.local | self.handed_out)))
        self.harness.planner.cancel(seq)
        self.drop(seq)

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A hand-off is over; pages of a finished prefill still hold the whole prompt."""
        done = sorted(seq for seq in self.handed_out if self.harness.outputs[seq].tokens)
        if not done:
            return
        seq = data.draw(st.sampled_from(done))
        self.check_handed_out(seq)
        assert self.harness.planner.release(seq)
        self.handed_out.discard(seq)

    @precondition(lambda self: self.local)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.local)))
        self.harness.engine.errors[seq] = "NaN"
        self.failing.add(seq)

    @rule()
    def launch(self) -> None:
        planner = self.harness.planner
        owners = [seq for seq in self.local if planner.knows(seq) and planner.pages(seq)]
        oldest = min(owners, key=self.age, default=None)
        self.harness.launch()
        if oldest is not None and not any(self.age(seq) < self.age(oldest) for seq in self.handed_out):
            assert planner.pages(oldest), "the oldest running sequence was preempted"

    @rule(turns=st.integers(1, 8), steps=st.sampled_from([1, 3, 4]))
    def go_on(self, turns: int, steps: int) -> None:
        """Several steps with nothing in between; at depth 1 always with a plan in flight."""
        for _ in range(turns):
            self.launch()
            if len(self.harness.engine.queue) > self.depth:
                self.collect(steps)

    @precondition(lambda self: self.harness.engine.queue)
    @rule(steps=st.sampled_from([1, 3, 4]))
    def collect(self, steps: int) -> None:
        for update in self.harness.collect(steps):
            if update.finish:
                self.local.discard(update.seq)

    def age(self, seq: int) -> tuple[int, int]:
        return (self.orders[seq], seq)

    def check_handed_out(self, seq: int) -> None:
        output, pages = self.harness.outputs[seq], self.harness.planner.pages(seq)
        size = self.harness.pool.block_size
        digests = prefix_digests(output.prompt)
        held = [self.harness.engine.slots.get((pages[p // size], p % size)) for p in range(len(digests))]
        assert held == digests
        assert output.tokens == [next_token(digests[-1])]

    @invariant()
    def invariants_hold(self) -> None:
        self.harness.planner.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        while self.open:
            self.abort(quarantine=False)
        if self.quarantined:
            self.late_write_then_fence()
        for _ in range(3000):
            for seq in sorted(self.handed_out):
                if self.harness.outputs[seq].tokens:
                    self.check_handed_out(seq)
                    self.harness.planner.release(seq)
                    self.handed_out.discard(seq)
            if not self.harness.planner.has_work():
                break
            self.harness.step()
        else:
            raise AssertionError(f"no end: {self.harness.planner.counts()}")
        self.harness.check_idle()
        for seq, output in self.harness.outputs.items():
            tokens, reason = self.harness.expected(seq)
            if output.finish in ("stop", "length"):
                assert (output.tokens, output.finish) == (tokens, reason)
            else:
                assert output.tokens == tokens[: len(output.tokens)]
                assert output.finish != "error" or seq in self.failing


@pytest.mark.parametrize("steps_max", [1, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_planner_machine(depth: int, steps_max: int) -> None:
    machine = type("Machine", (PlannerMachine,), {"depth": depth, "steps_max": steps_max})
    run_state_machine_as_test(machine, settings=SETTINGS)
