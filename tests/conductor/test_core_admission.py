"""Predictive admission in the core: what meets its objectives is taken, what would not is told at once, and why."""

from __future__ import annotations

import random

from conductor_world import World, all_of, only, request

from conductor.core.admission import PROBE_US, Objectives
from conductor.core.decision_log import DECISIONS_KEPT, DecisionLog, Explanation, RegretTotals
from conductor.core.decisions import Reject, Route
from conductor.core.latency import Actual
from conductor.core.machine import ConductorCore
from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.ids import AttemptRef
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

COST = CostModel(
    prefill=PrefillCost(base_us=0.0, token_us=1_000.0, pair_us=0.0),
    decode=DecodeCost(base_us=10_000.0, row_us=1_000.0, kv_token_us=0.0),
    kv_token_bytes=16,
)
"""16 tokens take 16 ms, a step of one sequence 11 ms."""


def world(cost: CostModel | None = COST, **objectives: float) -> World:
    made = World(ConductorCore(objectives=Objectives(ttft_factor=0.0, **objectives), cost=cost))
    made.join("p1", Role.PREFILL)
    made.join("d1", Role.DECODE)
    return made


def serve(made: World, request_id: str, tokens: int = 8, ttft_us: int = 16_000, step_us: int = 11_000) -> None:
    only(Route, made.submit(request_id, tokens=16))
    made.now_us += ttft_us
    made.outcome("p1", request_id, OutcomeKind.PREFILL_DONE)
    made.outcome("d1", request_id, OutcomeKind.HANDOFF_COMPLETE)
    made.now_us += step_us * (tokens - 1)
    made.outcome("d1", request_id, OutcomeKind.FINISHED, tokens_generated=tokens, reason="stop")
    made.finish(request_id)


def test_what_meets_its_objectives_is_taken() -> None:
    only(Route, world(ttft_us=25_000.0, tpot_us=50_000.0).submit("a", tokens=16))


def test_a_prompt_that_would_be_late_is_rejected_at_once_with_resource_and_retry_after() -> None:
    made = world(ttft_us=40_000.0)
    answers = [made.submit(f"r{n}", tokens=16)[0] for n in range(5)]
    assert isinstance(answers[0], Route)
    reject = answers[-1]
    assert isinstance(reject, Reject)
    assert (reject.code, reject.resource) == ("overloaded", "prefill")
    assert "TTFT" in reject.message
    assert reject.retry_after_ms >= 20


def test_another_pair_is_tried_before_anybody_is_rejected() -> None:
    made = world(ttft_us=40_000.0)
    for n in range(2):
        made.submit(f"r{n}", tokens=16)
    made.join("p2", Role.PREFILL)
    assert only(Route, made.submit("late", tokens=16)).prefill == made.refs["p2"]


def test_a_full_batch_is_waited_for_as_long_as_the_first_token_may_take() -> None:
    """The third sequence would make steps of 13 ms."""
    made = world(ttft_us=1_000_000.0, tpot_us=12_500.0)
    for n in range(2):
        only(Route, made.submit(f"r{n}", tokens=16))
    assert made.submit("third", tokens=16) == []
    made.outcome("p1", "r0", OutcomeKind.DONE_AT_P)
    assert only(Route, made.finish("r0")).key.request_id == "third"


def test_a_wait_in_vain_ends_with_the_objective() -> None:
    made = world(ttft_us=200_000.0, tpot_us=12_500.0)
    for n in range(2):
        made.submit(f"r{n}", tokens=16)
    made.submit("third", tokens=16)
    assert made.core.next_wakeup() is not None
    assert made.core.next_wakeup() <= 200_000  # type: ignore[operator]
    reject = only(Reject, made.wait(200_000))
    assert (reject.code, reject.resource) == ("overloaded", "instances")


def test_prefill_in_the_pipeline_counts_as_decode_load() -> None:
    """Nothing has landed on D, but two prompts are on their way: a third would find a batch of three."""
    made = world(ttft_us=10_000_000.0, tpot_us=12_500.0)
    for n in range(2):
        made.submit(f"r{n}", tokens=16)
    assert made.submit("third", tokens=16) == []
    assert all(instance.load is None for instance in made.core.fleet.instances.values())


def test_who_has_too_much_ahead_of_it_is_told_on_arrival() -> None:
    """One row on D: everybody else waits, each for 16 ms of prefill."""
    made = World(ConductorCore(objectives=Objectives(ttft_us=100_000.0, ttft_factor=0.0), cost=COST))
    made.join("p1", Role.PREFILL)
    made.join("d1", Role.DECODE, max_num_seqs=1)
    only(Route, made.submit("r0", tokens=16))
    answers = [made.submit(f"r{n}", tokens=16) for n in range(1, 9)]
    assert answers[:5] == [[]] * 5
    reject = only(Reject, answers[-1])
    assert reject.resource == "queue"
    assert "ahead" in reject.message
    assert reject.retry_after_ms >= 100


def test_urgent_requests_are_not_turned_away_for_a_queue_that_is_behind_them() -> None:
    made = World(ConductorCore(objectives=Objectives(ttft_us=100_000.0, ttft_factor=0.0), cost=COST))
    made.join("p1", Role.PREFILL)
    made.join("d1", Role.DECODE, max_num_seqs=1)
    for n in range(7):
        made.submit(f"r{n}", tokens=16)
    assert all_of(Reject, made.submit("urgent", tokens=16, priority=-1)) == []
    assert all_of(Reject, made.submit("late", tokens=16)) != []


def test_a_running_stream_is_never_turned_away() -> None:
    made = world(ttft_us=1_000.0)
    only(Reject, made.submit("new", tokens=16))
    only(Route, made.step(request("old", tokens=16, attempt=2)))


def test_a_prediction_that_keeps_everybody_out_is_tried_now_and_then() -> None:
    made = world(ttft_us=1_000.0)
    only(Reject, made.submit("a", tokens=16))
    made.now_us += PROBE_US - 1
    only(Reject, made.submit("b", tokens=16))
    made.now_us += 1
    only(Route, made.submit("c", tokens=16))
    assert "probe" in made.core.admission.log.find("c")[0].reason
    only(Reject, made.submit("d", tokens=16))


def test_while_nothing_is_known_of_costs_everything_is_admitted() -> None:
    only(Route, world(cost=None, ttft_us=1.0, tpot_us=1.0).submit("a", tokens=16))


def test_costs_are_learned_from_what_is_served_and_then_reject() -> None:
    made = world(cost=None, ttft_us=60_000.0)
    for n in range(40):
        made.report("d1", n + 1, running=1 + n % 4, tokens_running=16 * (1 + n % 4), step_us=10_000 + 1_000 * (n % 4))
        serve(made, f"r{n}")
    answers = [decision for n in range(12) for decision in made.submit(f"burst{n}", tokens=16)]
    assert isinstance(answers[0], Route)
    assert {reject.resource for reject in all_of(Reject, answers)} & {"prefill", "queue"}


def test_predictions_that_stop_holding_make_admission_careful() -> None:
    made = world(ttft_us=1_000_000.0)
    serve(made, "first")
    seen, draw = made.core.forecast._models["toy"].bounds["ttft"], random.Random(1)
    for _ in range(500):
        seen.observe(16_000.0, 16_000.0 * draw.gauss(1, 0.1))
    assert made.core.forecast.drift("toy") == ""
    before = bound(made, "before")
    for n in range(12):
        seen.observe(16_000.0, 40_000.0 + 4_000.0 * n)
    assert "ttft optimistic" in made.core.forecast.drift("toy")
    assert bound(made, "after") > 1.2 * before
    (entry,) = made.core.admission.log.find("after")
    assert "ttft optimistic" in entry.reason


def test_a_decision_is_kept_with_its_candidates_and_what_became_of_it() -> None:
    made = world(ttft_us=10_000_000.0)
    made.join("d2", Role.DECODE)
    serve(made, "a~gateway1", tokens=5, ttft_us=20_000, step_us=12_000)
    (entry,) = made.core.admission.log.find("a")
    assert (entry.decision, entry.candidates_total >= 2, len(entry.candidates) >= 2) == ("routed", True, True)
    chosen = entry.chosen
    assert chosen is not None
    assert chosen.terms is not None
    assert (chosen.prefill, chosen.tokens_compute, chosen.terms.ttft_us) == ("p1", 16, 16_000.0)
    assert entry.actual == Actual(ttft_us=20_000, tpot_us=12_000.0, tokens_generated=5)
    assert made.core.admission.log.regrets("toy", "ttft").sum_us == 4_000.0


def test_a_last_word_that_comes_after_the_end_still_counts() -> None:
    made = world(ttft_us=10_000_000.0)
    only(Route, made.submit("a", tokens=16))
    made.now_us += 16_000
    made.outcome("p1", "a", OutcomeKind.PREFILL_DONE)
    made.finish("a")
    made.now_us += 22_000
    made.outcome("d1", "a", OutcomeKind.FINISHED, tokens_generated=3, reason="stop")
    (entry,) = made.core.admission.log.find("a")
    assert entry.actual.tpot_us == 11_000.0


def test_a_rejection_is_explained_too() -> None:
    made = world(ttft_us=1_000.0)
    only(Reject, made.submit("a", tokens=16))
    (entry,) = made.core.admission.log.find("a")
    assert entry.decision == "rejected"
    assert all(choice.verdict.startswith("TTFT") for choice in entry.candidates)


def test_the_log_is_bounded_and_knows_the_ids_that_gateways_make() -> None:
    log = DecisionLog()
    for n in range(DECISIONS_KEPT + 10):
        log.add(explanation(f"r{n}~ab1"))
    assert len(log) == DECISIONS_KEPT
    assert log.find("r3") == []
    log.add(explanation("chat-7~ab2"))
    log.add(explanation("chat-7x~ab3"))
    assert [entry.key.request_id for entry in log.find("chat")] == ["chat-7~ab2"]


def test_regrets_are_counted_by_class() -> None:
    totals = RegretTotals().with_one(-5_000.0).with_one(0.0).with_one(20e6)
    assert (sum(totals.counts), totals.counts[-1], totals.sum_us) == (3, 1, 20e6 - 5_000.0)


def bound(made: World, request_id: str) -> float:
    """The q90 of TTFT with which a request is placed; it is gone afterwards."""
    only(Route, made.submit(request_id, tokens=16))
    made.finish(request_id)
    (entry,) = made.core.admission.log.find(request_id)
    assert entry.chosen is not None
    assert entry.chosen.terms is not None
    return entry.chosen.terms.ttft_q90_us


def explanation(request_id: str) -> Explanation:
    return Explanation(
        key=AttemptRef(request_id, 1),
        model="toy",
        tenant="",
        priority=0,
        tokens_known=1,
        decided_us=0,
        waited_us=0,
        decision="routed",
        reason="",
        candidates=(),
        candidates_total=0,
    )
