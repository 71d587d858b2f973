"""Seeded faults: the cores keep every promise, and a promise that is broken does not go unseen."""

from __future__ import annotations

import random

import pytest

from decode_worker.core import lending
from decode_worker.core.attempt import DecodeAttempt
from segue.handoff import DecodeEvent
from simulator import faults
from simulator.faults import FaultCluster, draw_scenario, run_seed
from simulator.session_front import BrokenPromise, ClientRequest, Oracle
from simulator.toy_clock_engine import ToyClockEngine
from worker_runtime.toy_engine import toy_tokens

REQUEST = ClientRequest(request_id="r", arrival_us=0, prompt=[1, 2, 3], max_tokens=3, seed=9)
TOKENS = toy_tokens([1, 2, 3], 3, seed=9)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_every_promise_is_kept(first: int) -> None:
    assert list(filter(None, map(run_seed, range(first, first + 20)))) == []


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_thousand_seeds_keep_every_promise() -> None:
    assert list(filter(None, map(run_seed, range(1_000, 2_000)))) == []


def test_a_seed_replays_to_the_same_run() -> None:
    runs = []
    for _ in range(2):
        cluster = FaultCluster(11)
        cluster.run()
        runs.append((cluster.heap.executed, cluster.heap.now_us, cluster.network.sent, cluster.ends()))
    assert runs[0] == runs[1]


def test_scenarios_differ_and_contain_every_misfortune() -> None:
    drawn = [draw_scenario(random.Random(seed)) for seed in range(200)]
    for kind in ("crashes", "hangs", "cuts", "broken_streams"):
        assert any(getattr(scenario, kind) for scenario in drawn)
    for share in ("lost", "doubled", "late", "replayed", "copy_failed"):
        assert any(getattr(scenario.storm, share) > 0 for scenario in drawn)
        assert any(getattr(scenario.storm, share) == 0 for scenario in drawn)


def test_a_page_that_arrives_damaged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ToyClockEngine.copy_page

    def damage(self: ToyClockEngine, source: ToyClockEngine, source_page: int, own_page: int) -> None:
        honest(self, source, source_page, own_page)
        self.toy.buffer[own_page * self.toy.layout.page_bytes] ^= 1

    monkeypatch.setattr(ToyClockEngine, "copy_page", damage)
    assert any(failure is not None and "the model says" in failure.message for failure in map(run_seed, range(5)))


def test_lent_pages_that_are_taken_back_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that a write of a peer can land until it has said that none will: without quarantine it is broken."""

    def give_back_at_once(self: lending.Lender, attempt: DecodeAttempt, reason: str, now_us: int) -> None:
        assert attempt.reservation is not None
        self._planner.reservation_abort(attempt.reservation, quarantine=False)
        attempt.handoff.advance(DecodeEvent.ABORT)
        attempt.ended_reason = reason
        self._say_abort(attempt, now_us)

    monkeypatch.setattr(lending.Lender, "quarantine", give_back_at_once)
    monkeypatch.setattr(lending.Lender, "recover", lambda self, attempt: setattr(attempt, "reservation", None))
    assert any(failure is not None and "in use there" in failure.message for failure in map(run_seed, range(60)))


def test_a_page_that_leaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(faults.BlockPool):
        def release(self, pages: object) -> None:
            super().release(list(pages)[1:])  # type: ignore[call-overload]

    monkeypatch.setattr(faults, "BlockPool", Leaky)
    failure = run_seed(3)
    assert failure is not None


def test_a_request_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.SessionFront, "on_attempt_failed", lambda *_: None)
    monkeypatch.setattr(faults, "PATIENCE_US", 2_000_000)
    assert any(failure is not None and "no end" in failure.message for failure in map(run_seed, range(20)))


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (TOKENS[1:], "token 0 and on"),
        ([*TOKENS, 5], "token 0 and on"),
        ([TOKENS[0], TOKENS[0]], "token 0 and on"),
    ],
)
def test_the_oracle_wants_each_token_once_and_in_order(tokens: list[int], complaint: str) -> None:
    with pytest.raises(BrokenPromise, match=complaint):
        Oracle(REQUEST).take(tokens)


def test_the_oracle_wants_one_end_and_nothing_after_it() -> None:
    oracle = Oracle(REQUEST)
    oracle.take(TOKENS)
    oracle.finish("length")
    with pytest.raises(BrokenPromise, match="ended twice"):
        oracle.finish("cancelled")
    with pytest.raises(BrokenPromise, match="after its end"):
        oracle.take([1])


def test_the_oracle_wants_all_tokens_before_an_end_by_length() -> None:
    oracle = Oracle(REQUEST)
    oracle.take(TOKENS[:2])
    with pytest.raises(BrokenPromise, match="2 of 3"):
        oracle.finish("length")
