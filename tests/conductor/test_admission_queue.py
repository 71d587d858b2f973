"""The waiting queue: order by priority, fair share and arrival; who makes room; what is ahead."""

from __future__ import annotations

import pytest
from conductor_world import MODEL, request
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.core.admission_queue import WAIT_US_MAX, AdmissionQueue
from conductor.core.fair_share import TENANTS_MAX, FairShare

LANE = (MODEL, b"")


def queued(queue: AdmissionQueue, tenant: str, count: int, *, priority: int = 0, prefill_us: float = 100.0) -> None:
    for n in range(count):
        queue.push(
            request(f"{tenant}{priority}.{n}", tenant=tenant, priority=priority), now_us=n, prefill_us=prefill_us
        )


def serve(queue: AdmissionQueue, count: int, gpu_us: float = 100.0) -> list[str]:
    """Tenants in the order they are served."""
    served = []
    for _ in range(count):
        head = queue.head(LANE)
        assert head is not None
        queue.remove(head.request.request_id)
        queue.charge(head, gpu_us)
        served.append(head.tenant)
    return served


def test_tenants_take_turns_however_many_requests_one_sends() -> None:
    queue = AdmissionQueue()
    queued(queue, "flood", 50)
    queued(queue, "quiet", 5)
    assert serve(queue, 10).count("quiet") == 5


def test_gpu_time_is_shared_by_weight() -> None:
    queue = AdmissionQueue({"gold": 3.0})
    queued(queue, "gold", 80)
    queued(queue, "free", 80)
    assert serve(queue, 40).count("gold") == 30


def test_dear_requests_count_for_more_than_cheap_ones() -> None:
    queue = AdmissionQueue()
    queued(queue, "long", 40)
    queued(queue, "short", 40)
    spent = {"long": 0.0, "short": 0.0}
    for _ in range(44):
        head = queue.head(LANE)
        assert head is not None
        queue.remove(head.request.request_id)
        gpu_us = 1_000.0 if head.tenant == "long" else 100.0
        queue.charge(head, gpu_us)
        spent[head.tenant] += gpu_us
    assert spent["long"] == pytest.approx(spent["short"], abs=1_000.0)


def test_idling_earns_no_credit() -> None:
    queue = AdmissionQueue()
    queued(queue, "busy", 100)
    serve(queue, 50)
    queued(queue, "back", 20)
    assert serve(queue, 20).count("back") in (10, 11)


def test_urgency_comes_before_fairness_and_a_running_stream_before_new_ones() -> None:
    queue = AdmissionQueue()
    queued(queue, "a", 2)
    queue.push(request("again", attempt=2, tenant="b"), now_us=9)
    queue.push(request("urgent", priority=-1, tenant="b"), now_us=10)
    order = []
    while (head := queue.head(LANE)) is not None:
        order.append(head.request.request_id)
        queue.remove(head.request.request_id)
    assert order == ["urgent", "again", "a0.0", "a0.1"]


def test_what_is_ahead_is_more_urgent_or_let_pass_by_the_share() -> None:
    queue = AdmissionQueue()
    queued(queue, "flood", 10)
    queued(queue, "urgent", 3, priority=-1)
    late = queue.push(request("late", tenant="quiet"), now_us=99, prefill_us=100.0)
    assert queue.ahead(late) == (3, 300.0), "its tenant has nothing else waiting: the flood lets it pass"
    last = queue.push(request("last", tenant="flood"), now_us=100, prefill_us=100.0)
    assert queue.ahead(last) == (3 + 11, 300.0 + 1_100.0)


@pytest.mark.parametrize(
    ("tenant", "priority", "displaced"),
    [("flood", 0, None), ("quiet", 0, "flood0.9"), ("flood", -1, "flood0.9"), ("quiet", 1, None)],
)
def test_whoever_fills_the_queue_makes_room(tenant: str, priority: int, displaced: str | None) -> None:
    queue = AdmissionQueue()
    queued(queue, "flood", 10)
    queued(queue, "quiet", 2)
    victim = queue.displaced_by(request("new", tenant=tenant, priority=priority))
    assert (None if victim is None else victim.request.request_id) == displaced


def test_a_running_stream_is_never_displaced() -> None:
    queue = AdmissionQueue()
    for n in range(4):
        queue.push(request(f"r{n}", attempt=2, tenant="flood"), now_us=n)
    assert queue.displaced_by(request("new", priority=-9)) is None


def test_the_objectives_budget_ends_the_wait_before_the_longest_one() -> None:
    queue = AdmissionQueue()
    assert queue.push(request("a"), 100, budget_us=500).expires_us == 600
    assert queue.push(request("b"), 100).expires_us == 100 + WAIT_US_MAX
    assert queue.push(request("c", deadline_us=50), 100, budget_us=500).expires_us == 150


def test_counters_of_idle_tenants_are_bounded() -> None:
    share = FairShare()
    for n in range(3 * TENANTS_MAX):
        share.enter(f"t{n}")
        share.charge(f"t{n}", 10.0)
        share.leave(f"t{n}")
    assert len(share._counters) <= TENANTS_MAX + 1


class QueueAgainstModel(RuleBasedStateMachine):
    """The model is a list; its order comes from the documented key, its counters from a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue({"b": 2.0})
        self.model: list[tuple[str, str, tuple[int, bool], int]] = []
        self.now_us = 0

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-1, 1), again=st.booleans())
    def push(self, tenant: str, priority: int, again: bool) -> None:
        self.now_us += 1
        asked = request(f"r{self.now_us}", tenant=tenant, priority=priority, attempt=2 if again else 1)
        waiting = self.queue.push(asked, self.now_us, prefill_us=10.0)
        self.model.append((asked.request_id, tenant, waiting.rank, self.now_us))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(entry[0]) is not None
        self.model.remove(entry)

    @precondition(lambda self: self.model)
    @rule(gpu_us=st.floats(1, 1e6))
    def serve_head(self, gpu_us: float) -> None:
        head = self.queue.head(LANE)
        assert head is not None
        best = min(rank for _, _, rank, _ in self.model)
        firsts = [entry for entry in self.model if entry[2] == best]
        own = [entry for entry in firsts if entry[1] == head.tenant]
        assert head.request.request_id == min(own, key=lambda entry: entry[3])[0], "first come within a tenant"
        share = self.queue._share(MODEL)
        assert share.counter(head.tenant) == min(share.counter(tenant) for _, tenant, _, _ in firsts)
        self.queue.remove(head.request.request_id)
        self.queue.charge(head, gpu_us)
        self.model.remove(own[0])

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.model)
        assert sorted(each.request.request_id for each in self.queue.in_lane(LANE)) == sorted(e[0] for e in self.model)
        for tenant in "abc":
            assert self.queue.waiting_of(MODEL, tenant) == sum(entry[1] == tenant for entry in self.model)


TestQueueAgainstModel = QueueAgainstModel.TestCase


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e4)), min_size=1, max_size=200))
def test_no_tenant_that_always_waits_lags_behind_by_more_than_one_request(costs: list[tuple[str, float]]) -> None:
    """Start-time fair queueing: shares of tenants that wait all the time differ by at most their largest requests."""
    share = FairShare()
    for tenant in "abc":
        share.enter(tenant)
    spent = dict.fromkeys("abc", 0.0)
    for _, gpu_us in costs:
        tenant = min("abc", key=lambda each: (share.counter(each), each))
        share.charge(tenant, gpu_us)
        spent[tenant] += gpu_us
    largest = max(gpu_us for _, gpu_us in costs)
    assert max(spent.values()) - min(spent.values()) <= largest + 1e-6
