"""The prefill core alone: when it asks, what it refuses, how it ends. The pair is tested in tests/segue."""

from __future__ import annotations

import pytest

from prefill_worker.core.asking import PASSED_OVER_MAX, next_to_ask
from prefill_worker.core.attempt import PrefillAttempt
from prefill_worker.core.core import PrefillCore
from segue import handoff_messages as wire
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_hash import block_hashes, token_bytes
from segue.block_pool import BlockPool
from segue.handoff import HandoffTiming, PrefillState
from segue.ids import AttemptRef, InstanceRef
from segue.plan import PlanResult, RowTokens
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, OutcomeKind, Peer
from worker_runtime import events as ev

ME, D, OTHER_D = InstanceRef("p", 1), InstanceRef("d", 1), InstanceRef("e", 1)
TIMING = HandoffTiming(lease_us=1_000_000)
CHUNK = 8


TARGET = Peer(ref=D, name=D.uuid, control_address="mem")


def assigned(request_id: str, length: int, start: int = 0, target: InstanceRef = D, deadline_ms: int = 0) -> Assign:
    return Assign(
        request_id=request_id,
        attempt=1,
        gateway="g",
        token_ids=token_bytes(range(start, start + length)),
        tokens_prompt=length,
        sampling=SamplingParams(max_tokens=4),
        decode=Peer(ref=target, name=target.uuid, control_address="mem"),
        deadline_ms=deadline_ms,
    )


class Driver:
    def __init__(self) -> None:
        self.pool = BlockPool(16, 4)
        planner = BatchPlanner(self.pool, PlannerLimits(4, CHUNK, 64), ())
        self.core = PrefillCore(ME, planner, self.pool, TIMING, CHUNK)
        self.now_us = 0

    def step(self, *events: ev.Event, after_us: int = 1) -> list[ev.Decision]:
        self.now_us += after_us
        decisions = self.core.step(self.now_us, list(events))
        self.core.check()
        return decisions

    def hear(self, message: wire.HandoffMessage) -> list[ev.Decision]:
        return self.step(ev.PeerMessage(message))

    def assign(
        self, request_id: str, length: int, *, start: int = 0, target: InstanceRef = D, deadline_ms: int = 0
    ) -> list[ev.Decision]:
        return self.step(ev.Assigned(assigned(request_id, length, start, target, deadline_ms), "c"))

    def linked(self, *targets: InstanceRef) -> Driver:
        for target in targets or (D,):
            self.assign(f"warm-{target.uuid}", 1, target=target)
            self.step(ev.LinkReady(target))
            self.hear(wire.Empty(f"warm-{target.uuid}", 1, target, ME))
        return self

    def grant(self, request_id: str, pages: list[int]) -> list[ev.Decision]:
        return self.hear(wire.Grant(request_id, 1, D, ME, pages, 0, TIMING.lease_us))


def said(decisions: list[ev.Decision], kind: type) -> list[str]:
    messages = [decision.message for decision in decisions if isinstance(decision, ev.SendPeer)]
    return [message.request_id for message in messages if type(message) is kind]


def outcomes(decisions: list[ev.Decision]) -> list[OutcomeKind]:
    return [decision.outcome.kind for decision in decisions if isinstance(decision, ev.Report)]


def of_kind(decisions: list[ev.Decision], kind: type) -> list[ev.Decision]:
    return [decision for decision in decisions if type(decision) is kind]


def test_first_attempt_for_a_peer_opens_the_link_and_waits_for_it() -> None:
    driver = Driver()
    decisions = driver.assign("a", 8)
    assert [type(decision) for decision in decisions] == [ev.OpenLink]
    assert said(driver.step(ev.LinkReady(D)), wire.GrantRequest) == ["a"]


def test_asks_only_while_less_than_a_chunk_is_ahead() -> None:
    driver = Driver().linked()
    asked = [said(driver.assign(name, 5), wire.GrantRequest) for name in "abcd"]
    assert asked == [["a"], ["b"], [], []]


def keep(driver: Driver, length: int) -> None:
    """Leave the blocks of the prompt `range(length)` in the cache."""
    hashes = block_hashes(b"", token_bytes(range(length)), driver.pool.block_size)
    pages = driver.pool.allocate(len(hashes))
    for place, page in enumerate(pages):
        driver.pool.publish(page, hashes[place], hashes[place - 1] if place else b"")
    driver.pool.release(pages)


def test_the_longest_cached_prefix_is_started_first() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    driver.assign("cold", 7, start=100)
    driver.assign("cached", 9)
    keep(driver, 8)
    driver.grant("a", [0, 1])
    assert said(driver.hear(wire.Abort("a", 1, D, ME, "gone")), wire.GrantRequest) == ["cached"]
    assert driver.core.load().tokens_queued == 7 + 1, "what is cached is not queued"


def test_nobody_is_passed_over_for_ever() -> None:
    attempts = [
        PrefillAttempt(assigned(f"r{n}", 9 if n else 7, start=0 if n else 100), TARGET, "c", n, 0) for n in range(12)
    ]
    driver = Driver()
    keep(driver, 8)
    started = []
    while attempts:
        chosen = next_to_ask(attempts, driver.pool)
        assert chosen is not None
        attempts.remove(chosen)
        started.append(chosen.key.request_id)
    assert started.index("r0") == PASSED_OVER_MAX


def test_one_ds_waiting_attempts_do_not_block_another_d() -> None:
    driver = Driver().linked(D, OTHER_D)
    driver.assign("a", 12)
    assert said(driver.assign("b", 12), wire.GrantRequest) == []
    assert said(driver.assign("c", 12, target=OTHER_D), wire.GrantRequest) == ["c"]


def test_unanswered_request_is_repeated_and_given_up_in_the_end() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    assert said(driver.step(after_us=TIMING.repeat_us), wire.GrantRequest) == ["a"]
    kinds: list[OutcomeKind] = []
    for _ in range(40):
        driver.hear(wire.Heartbeat(D, ME, []))
        kinds += outcomes(driver.step(after_us=TIMING.repeat_us))
    assert kinds == [OutcomeKind.FAILED]
    assert driver.core.live() == []


def test_silent_d_ends_its_attempts_within_the_holders_share() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    assert outcomes(driver.step(after_us=TIMING.holder_us - 1)) == []
    assert outcomes(driver.step()) == [OutcomeKind.FAILED]


def test_refused_link_tells_the_conductor_why() -> None:
    driver = Driver()
    driver.assign("a", 8)
    decisions = driver.step(ev.LinkRefused(D, "block size differs"))
    (report,) = of_kind(decisions, ev.Report)
    assert isinstance(report, ev.Report)
    assert (report.outcome.kind, report.outcome.reason) == (OutcomeKind.REFUSED, "block size differs")


@pytest.mark.parametrize("length", [64, 200])
def test_prompt_that_could_never_fit_is_refused_at_once(length: int) -> None:
    assert outcomes(Driver().linked().assign("a", length)) == [OutcomeKind.REFUSED]


def test_draining_instance_takes_nothing_new() -> None:
    driver = Driver().linked()
    driver.step(ev.Drain())
    assert outcomes(driver.assign("a", 4)) == [OutcomeKind.REFUSED]
    assert driver.core.load().draining


def test_deadline_ends_an_attempt() -> None:
    driver = Driver().linked()
    driver.assign("a", 8, deadline_ms=5)
    assert outcomes(driver.step(after_us=5_000)) == [OutcomeKind.FAILED]


def test_failed_row_ends_the_request_and_frees_d() -> None:
    driver = Driver().linked()
    driver.assign("a", 4)
    (run,) = of_kind(driver.grant("a", [3]), ev.RunPlan)
    assert isinstance(run, ev.RunPlan)
    row = run.plan.starts[0]
    failed = PlanResult(
        op=run.plan.op, steps=1, rows=[RowTokens(row.row, row.seq, [], None, "NaN logits")], elapsed_us=1
    )
    decisions = driver.step(ev.PlanFinished(failed))
    (push,) = of_kind(decisions, ev.PushTokens)
    assert isinstance(push, ev.PushTokens)
    assert (push.deltas[0].finish, push.deltas[0].error) == ("error", "NaN logits")
    assert said(decisions, wire.DoneAtP) == ["a"]
    assert driver.core.live() == []


def test_source_pages_stay_held_while_the_mover_reads_them() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    (run,) = of_kind(driver.grant("a", [0, 1]), ev.RunPlan)
    assert isinstance(run, ev.RunPlan)
    row = run.plan.starts[0]
    done = PlanResult(op=run.plan.op, steps=1, rows=[RowTokens(row.row, row.seq, [5])], elapsed_us=1)
    (move,) = of_kind(driver.step(ev.PlanFinished(done)), ev.MovePages)
    assert isinstance(move, ev.MovePages)
    decisions = driver.step(ev.CancelRequested(AttemptRef("a", 1), "client gone"))
    assert of_kind(decisions, ev.CancelMove) == [ev.CancelMove(move.op)]
    assert said(decisions, wire.Abort) == []
    assert driver.pool.counts().held == 2
    assert driver.core.states()[AttemptRef("a", 1)] is PrefillState.ABORTING
    decisions = driver.step(ev.PagesMoved(move.op, 0, "cancelled"))
    assert said(decisions, wire.Abort) == ["a"]
    assert driver.pool.counts().held == 0


def test_completion_of_an_unknown_op_is_counted() -> None:
    driver = Driver()
    assert driver.step(ev.PagesMoved(77, 1)) == []
    assert driver.core.stale["PagesMoved"] == 1


def test_message_for_a_predecessor_is_answered_stale() -> None:
    driver = Driver()
    older = InstanceRef("p", 0)
    decisions = driver.hear(wire.Grant("a", 1, D, older, [1], 0, 10))
    assert said(decisions, wire.Stale) == ["a"]


def test_stopping_fails_what_runs_and_tells_d() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    decisions = driver.step(ev.Stopping("bye"))
    assert outcomes(decisions) == [OutcomeKind.FAILED]
    assert said(decisions, wire.Abort) == ["a"]
    assert driver.core.live() == []


def test_lease_is_the_granters_and_a_shorter_one_ends_sooner() -> None:
    driver = Driver().linked()
    driver.assign("a", 8)
    driver.hear(wire.Grant("a", 1, D, ME, [0, 1], 0, 1000))
    assert outcomes(driver.step(after_us=799)) == []
    assert outcomes(driver.step()) == [OutcomeKind.FAILED]


def test_unanswered_request_does_not_keep_others_from_asking() -> None:
    driver = Driver().linked()
    driver.assign("lost", CHUNK)
    assert said(driver.assign("b", CHUNK), wire.GrantRequest) == []
    assert "b" in said(driver.step(after_us=TIMING.repeat_us), wire.GrantRequest)


def test_stranger_at_the_address_of_d_ends_the_attempt_with_what_it_says() -> None:
    """D was started again, or another instance listens there: D itself will not answer any more."""
    driver = Driver().linked()
    driver.assign("a", 8)
    driver.grant("a", [1, 2])
    successor = InstanceRef(D.uuid, D.incarnation + 1)
    decisions = driver.hear(wire.Stale("a", 1, successor, ME, "d/1 is not here, this is d/2"))
    assert outcomes(decisions) == [OutcomeKind.FAILED]
    assert "d/1 is not here, this is d/2" in repr(decisions)
