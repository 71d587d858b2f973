"""Hypothesis against the pair: messages lost, repeated, reordered and late; cancels and restarts at any moment.

The oracle is the toy model itself and the rig's checks; at the end the network heals, and within a few leases both
sides must be idle with every page free or cached.
"""

from __future__ import annotations

from handoff_pair_rig import TIMING, Pair
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from test_handoff_pair import assert_nothing_left, prompt_of

from segue.ids import AttemptRef
from worker_runtime import events as ev
from worker_runtime.toy_engine import toy_tokens


class HandoffMachine(RuleBasedStateMachine):
    @initialize(depth=st.integers(0, 1), chunk=st.sampled_from([4, 8, 32]), pages_d=st.sampled_from([12, 32]))
    def start(self, depth: int, chunk: int, pages_d: int) -> None:
        self.pair = Pair(pages_p=24, pages_d=pages_d, chunk=chunk, depth=depth)
        self.prompts: dict[AttemptRef, list[int]] = {}

    @rule(length=st.integers(1, 30), salt=st.integers(0, 2), to_p=st.booleans(), max_tokens=st.integers(1, 6))
    def submit(self, length: int, salt: int, to_p: bool, max_tokens: int) -> None:
        """Now and then one of the two Assigns is lost."""
        prompt = prompt_of(length, salt)
        assign = self.pair.assign(f"r{len(self.prompts)}", prompt, max_tokens=max_tokens)
        self.prompts[assign.key] = prompt
        self.pair.submit(assign, to_p=to_p or length % 3 > 0, to_d=to_p or length % 3 < 2)

    @rule(index=st.integers(0, 7))
    def deliver_any(self, index: int) -> None:
        self.pair.deliver(index)

    @rule()
    def deliver_all(self) -> None:
        for _ in range(len(self.pair.network)):
            self.pair.deliver()

    @rule(index=st.integers(0, 7))
    def lose(self, index: int) -> None:
        if self.pair.network:
            self.pair.network.pop(index % len(self.pair.network))

    @rule(index=st.integers(0, 7))
    def repeat(self, index: int) -> None:
        if self.pair.network:
            self.pair.network.append(self.pair.network[index % len(self.pair.network)])

    @rule(on_p=st.booleans())
    def finish_plan(self, on_p: bool) -> None:
        self.pair.finish_plan(self.pair.p if on_p else self.pair.d)

    @rule(fail_after=st.none() | st.integers(0, 2))
    def finish_move(self, fail_after: int | None) -> None:
        self.pair.finish_move(fail_after=fail_after)

    @rule(eighths=st.sampled_from([1, 2, 9]))
    def wait(self, eighths: int) -> None:
        self.pair.wait(eighths * TIMING.repeat_us)

    @rule(number=st.integers(0, 9), on_p=st.booleans(), on_d=st.booleans())
    def cancel(self, number: int, on_p: bool, on_d: bool) -> None:
        key = AttemptRef(f"r{number}", 1)
        if on_p:
            self.pair.cancel(self.pair.p, key)
        if on_d:
            self.pair.cancel(self.pair.d, key)

    @rule(which=st.sampled_from(["p", "d"]))
    def restart(self, which: str) -> None:
        self.pair.restart(which)

    @rule()
    def break_connection(self) -> None:
        """Everything on its way is lost, and P notices the new connection."""
        self.pair.network.clear()
        self.pair.step(self.pair.p, ev.LinkRestored(self.pair.d.ref))

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.settle(leases=20)
        assert_nothing_left(self.pair)
        for key, reason in self.pair.finished.items():
            tokens = self.pair.generated(key)
            assert reason == "length"
            assert tokens == toy_tokens(self.prompts[key], len(tokens), seed=7)


HandoffMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHandoffMachine = HandoffMachine.TestCase
