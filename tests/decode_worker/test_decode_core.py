"""The decode core alone: local prefill, emission, refusals, preemption. The pair is tested in tests/segue."""

from __future__ import annotations

import pytest

from decode_worker.core.core import DecodeCore
from decode_worker.core.lending import EarlyRequests
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_hash import token_bytes
from segue.block_pool import BlockPool
from segue.handoff import EARLY_MESSAGES_MAX, DecodeState, HandoffTiming
from segue.ids import AttemptRef, InstanceRef
from segue.plan import PlanResult, RowTokens
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, OutcomeKind, Peer
from worker_runtime import events as ev
from worker_runtime.toy_engine import ToyEngine, toy_tokens

ME, P = InstanceRef("d", 1), InstanceRef("p", 1)
TIMING = HandoffTiming(lease_us=1_000_000)


class Driver:
    """A core with a toy engine; plans are executed by `run`."""

    def __init__(self, pages: int = 32, *, depth: int = 0, steps_max: int = 1) -> None:
        self.pool = BlockPool(pages, 4)
        self.engine = ToyEngine(pages, 4)
        planner = BatchPlanner(self.pool, PlannerLimits(8, 16, 128, depth, steps_max), ())
        self.core = DecodeCore(ME, planner, self.pool, TIMING)
        self.now_us = 0
        self.plans = 0
        self.pushed: list[ev.PushTokens] = []
        self.outcomes: dict[str, list[OutcomeKind]] = {}

    def step(self, *events: ev.Event, after_us: int = 1) -> list[ev.Decision]:
        self.now_us += after_us
        decisions = self.core.step(self.now_us, list(events))
        self.core.check()
        for decision in decisions:
            if isinstance(decision, ev.RunPlan):
                self.engine.launch(decision.plan)
                self.plans += 1
            elif isinstance(decision, ev.PushTokens):
                self.pushed.append(decision)
            elif isinstance(decision, ev.Report):
                self.outcomes.setdefault(decision.outcome.request_id, []).append(decision.outcome.kind)
        return decisions

    def run(self, plans_max: int = 10_000) -> None:
        while self.plans and plans_max:
            self.plans -= 1
            plans_max -= 1
            self.step(ev.PlanFinished(self.engine.collect()))

    def submit(
        self, request_id: str, prompt: list[int], *, max_tokens: int = 5, gateway: str = "g", prefill: bool = False
    ) -> list[ev.Decision]:
        peer = Peer(ref=P, name="p", control_address="mem")
        assign = Assign(
            request_id=request_id,
            attempt=1,
            gateway=gateway,
            token_ids=token_bytes(prompt),
            tokens_prompt=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=1),
            prefill=peer if prefill else None,
        )
        return self.step(ev.Assigned(assign, "c"))

    def generated(self, request_id: str) -> list[int]:
        deltas = [delta for push in self.pushed for delta in push.deltas if delta.request_id == request_id]
        positions = [delta.position for delta in deltas]
        assert positions == sorted(positions)
        return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps_max", [1, 4])
def test_local_prefill_generates_the_models_tokens(depth: int, steps_max: int) -> None:
    driver = Driver(depth=depth, steps_max=steps_max)
    prompts = {f"r{length}": list(range(length)) for length in (1, 4, 5, 31)}
    for name, prompt in prompts.items():
        driver.submit(name, prompt, max_tokens=9)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.generated(name) == toy_tokens(prompt, 9, seed=1)
        assert driver.outcomes[name] == [OutcomeKind.PREFILL_DONE, OutcomeKind.FINISHED]
    assert not driver.core.live()
    assert driver.core.next_wakeup() is None


def test_one_message_for_each_gateway_and_step() -> None:
    driver = Driver()
    for number in range(4):
        driver.submit(f"r{number}", [number, 2], gateway=f"g{number % 2}", max_tokens=50)
    driver.run(plans_max=2)
    driver.pushed.clear()
    driver.run(plans_max=1)
    assert sorted((push.gateway, len(push.deltas)) for push in driver.pushed) == [("g0", 2), ("g1", 2)]


def test_preempted_request_goes_on_with_the_same_tokens() -> None:
    driver = Driver(pages=9)
    for name in ("a", "b", "c"):
        driver.submit(name, [ord(name)] * 6, max_tokens=14)
    driver.run()
    assert driver.core.load().preemptions > 0
    for name in ("a", "b", "c"):
        assert driver.generated(name) == toy_tokens([ord(name)] * 6, 14, seed=1)


def test_cancel_and_finish_in_one_step_give_one_outcome() -> None:
    driver = Driver()
    driver.submit("a", [1, 2], max_tokens=1)
    driver.step(ev.CancelRequested(AttemptRef("a", 0), "client gone"), ev.PlanFinished(driver.engine.collect()))
    assert driver.outcomes["a"] == [OutcomeKind.CANCELLED]
    assert not driver.core.live()
    assert driver.pool.counts().active == 0


def test_failed_row_ends_only_its_own_request() -> None:
    driver = Driver()
    driver.submit("a", [1, 2])
    driver.submit("b", [3, 4])
    driver.run(plans_max=2)
    result = driver.engine.collect()
    driver.plans -= 1
    rows = [
        RowTokens(row.row, row.seq, [], None, "NaN logits") if index == 0 else row
        for index, row in enumerate(result.rows)
    ]
    driver.step(ev.PlanFinished(PlanResult(op=result.op, steps=1, rows=rows, elapsed_us=1)))
    driver.run()
    finishes = {delta.request_id: (delta.finish, delta.error) for push in driver.pushed for delta in push.deltas}
    assert sorted(finishes.values()) == [("error", "NaN logits"), ("length", "")]


@pytest.mark.parametrize("length", [128, 500])
def test_prompt_that_could_never_fit_is_refused_at_once(length: int) -> None:
    driver = Driver()
    driver.submit("a", [1] * length)
    assert driver.outcomes["a"] == [OutcomeKind.REFUSED]


def test_nothing_left_to_generate_is_refused_with_a_reason() -> None:
    driver = Driver()
    driver.submit("a", [1, 2], max_tokens=0)
    assert driver.outcomes["a"] == [OutcomeKind.REFUSED]
    assert not driver.core.live()


def test_draining_instance_finishes_what_runs_and_takes_nothing_new() -> None:
    driver = Driver()
    driver.submit("a", [1, 2])
    driver.step(ev.Drain())
    driver.submit("b", [1, 2])
    driver.run()
    assert driver.outcomes == {"a": [OutcomeKind.PREFILL_DONE, OutcomeKind.FINISHED], "b": [OutcomeKind.REFUSED]}


def test_assign_said_twice_runs_once() -> None:
    driver = Driver()
    driver.submit("a", [1, 2])
    driver.submit("a", [1, 2])
    driver.run()
    assert driver.outcomes["a"] == [OutcomeKind.PREFILL_DONE, OutcomeKind.FINISHED]
    assert driver.core.stale["assigned twice"] == 1


def test_lent_pages_are_held_and_in_no_block_table() -> None:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    decisions = driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    (lend,) = [decision for decision in decisions if isinstance(decision, ev.LendPages)]
    assert len(lend.pages) == driver.pool.counts().held == 3


def test_repeated_grant_request_gets_the_same_grant() -> None:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    first = driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    again = driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    grants = [decision for decision in first + again if isinstance(decision, ev.SendPeer)]
    assert len(grants) == 2
    assert grants[0] == grants[1]


def test_process_that_ended_frees_its_lent_pages_without_a_fence() -> None:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    driver.step(ev.PeerGone(P))
    assert driver.outcomes["a"] == [OutcomeKind.GRANTED, OutcomeKind.FAILED]
    counts = driver.pool.counts()
    assert (counts.held, counts.quarantined) == (0, 0)


def test_message_of_another_prefill_instance_is_not_believed() -> None:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    stranger = InstanceRef("p", 0)
    decisions = driver.step(ev.PeerMessage(wire.PrefillDone("a", 1, stranger, ME, 5, None, 3, 3)))
    assert [type(decision.message) for decision in decisions if isinstance(decision, ev.SendPeer)] == [wire.Stale]
    assert driver.pool.counts().held == 3


def test_early_requests_are_bounded_and_expire() -> None:
    early = EarlyRequests(lease_us=10)
    for number in range(EARLY_MESSAGES_MAX + 5):
        early.keep(wire.GrantRequest(str(number), 1, P, ME), now_us=0)
    assert len(early) == EARLY_MESSAGES_MAX
    assert len(early.expire(10)) == EARLY_MESSAGES_MAX
    assert len(early) == 0


def test_request_whose_assign_never_comes_is_answered_stale_after_a_lease() -> None:
    driver = Driver()
    driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    assert driver.core.next_wakeup() is not None
    decisions = driver.step(after_us=TIMING.lease_us)
    assert [type(decision.message) for decision in decisions if isinstance(decision, ev.SendPeer)] == [wire.Stale]


def lent_and_cancelled() -> tuple[Driver, ev.Fence]:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    decisions = driver.step(ev.CancelRequested(AttemptRef("a", 1), "client gone"))
    (fence,) = [decision for decision in decisions if isinstance(decision, ev.Fence)]
    assert ev.LendPages(P, [], AttemptRef("a", 1)) in decisions
    return driver, fence


def test_cancel_asks_the_mover_at_once_whether_lent_pages_are_safe() -> None:
    driver, fence = lent_and_cancelled()
    assert (fence.peer, fence.attempt) == (P, AttemptRef("a", 1))
    assert driver.pool.counts().quarantined == 3


def test_pages_proven_safe_are_free_before_p_answers() -> None:
    driver, fence = lent_and_cancelled()
    driver.step(ev.Fenced(fence.op, P, True))
    assert driver.pool.counts().quarantined == 0
    assert list(driver.core.states().values()) == [DecodeState.ABORTING]
    driver.step(ev.PeerMessage(wire.AbortAck("a", 1, P, ME)))
    assert not driver.core.live()


def test_pages_not_proven_safe_wait_for_p() -> None:
    driver, fence = lent_and_cancelled()
    driver.step(ev.Fenced(fence.op, P, False))
    assert driver.pool.counts().quarantined == 3
    driver.step(ev.PeerMessage(wire.AbortAck("a", 1, P, ME)))
    assert driver.pool.counts().quarantined == 0


def test_pages_are_taken_back_before_a_batch_may_use_them() -> None:
    driver = Driver()
    driver.submit("a", list(range(10)), prefill=True)
    driver.step(ev.PeerMessage(wire.GrantRequest("a", 1, P, ME)))
    decisions = driver.step(ev.PeerMessage(wire.PrefillDone("a", 1, P, ME, 5, None, 3, 3)))
    kinds = [type(decision) for decision in decisions]
    assert ev.LendPages(P, [], AttemptRef("a", 1)) in decisions
    assert kinds.index(ev.LendPages) < kinds.index(ev.RunPlan)
