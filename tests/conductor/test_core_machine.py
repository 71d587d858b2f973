"""The whole Conductor core under random events, against a model that follows each attempt to its one end."""

from conductor_world import chain, load, manifest, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.core.decisions import AttemptFailed, CancelAttempt, Decision, Reject, Resync, Route
from conductor.core.events import (
    DrainRequested,
    InstanceJoined,
    InstanceLost,
    KvPublished,
    LoadReported,
    OutcomeReported,
    RequestFinished,
    Tick,
)
from conductor.core.machine import ConductorCore
from segue.ids import AttemptRef, InstanceRef
from segue.kv_events import BlocksCleared, BlocksStored, KvEventBatch
from segue.manifest import Role
from segue.worker_messages import Outcome, OutcomeKind

ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE, "a1": Role.AGGREGATED}
NAMES = st.sampled_from(sorted(ROLES))
REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4", "r5"])
PREFIXES = st.sampled_from(["x", "y"])


class ConductorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = ConductorCore(queue_max=2)
        self.now_us = 0
        self.incarnations: dict[str, int] = {}
        self.members: dict[str, InstanceRef] = {}
        self.attempt_numbers: dict[str, int] = {}
        self.waiting: set[AttemptRef] = set()
        self.routed: dict[AttemptRef, Route] = {}
        self.ended: set[AttemptRef] = set()

    def step(self, *events: object) -> None:
        for decision in self.core.step(self.now_us, events):  # type: ignore[arg-type]
            self.follow(decision)

    def follow(self, decision: Decision) -> None:
        match decision:
            case Route(key=key):
                self.waiting.remove(key)
                self.routed[key] = decision
                assert all(ref in self.members.values() for ref in (decision.prefill, decision.decode) if ref)
            case Reject(key=key):
                self.waiting.remove(key)
                self.ended.add(key)
            case AttemptFailed(key=key):
                del self.routed[key]
                self.ended.add(key)
            case CancelAttempt() | Resync():
                assert decision.ref in self.members.values(), "a decision for an instance that is gone"

    @rule(name=NAMES, restarts=st.booleans(), pages=st.integers(4, 12), rows=st.integers(1, 3))
    def join(self, name: str, restarts: bool, pages: int, rows: int) -> None:
        self.incarnations[name] = self.incarnations.get(name, 1) + restarts
        ref = InstanceRef(name, self.incarnations[name])
        self.members[name] = ref
        member = manifest(name, ROLES[name], ref=ref, pages_total=pages, max_num_seqs=rows)
        self.step(InstanceJoined(manifest=member))

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        ref = self.members.pop(name, InstanceRef(name, 0))
        self.step(InstanceLost(ref=ref, reason="gone"))

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        self.step(DrainRequested(uuid=name))

    @rule(request_id=REQUESTS, prefix=PREFIXES, tokens=st.integers(1, 30), growth=st.integers(1, 12))
    def submit(self, request_id: str, prefix: str, tokens: int, growth: int) -> None:
        attempt = self.attempt_numbers[request_id] = self.attempt_numbers.get(request_id, 0) + 1
        self.retire(request_id)
        self.waiting.add(AttemptRef(request_id, attempt))
        hashes = chain(prefix, tokens // 4)
        self.step(request(request_id, tokens, growth, attempt=attempt, block_hashes=hashes, deadline_us=10**7))

    @rule(request_id=REQUESTS)
    def finish(self, request_id: str) -> None:
        self.retire(request_id)
        self.step(RequestFinished(request_id=request_id, reason="stop"))

    def retire(self, request_id: str) -> None:
        """The gateway itself ends what is open of the request."""
        for key in [key for key in (*self.waiting, *self.routed) if key.request_id == request_id]:
            self.waiting.discard(key)
            self.routed.pop(key, None)
            self.ended.add(key)

    @precondition(lambda self: self.routed)
    @rule(data=st.data(), kind=st.sampled_from(OutcomeKind))
    def report_outcome(self, data: st.DataObject, kind: OutcomeKind) -> None:
        route = self.routed[data.draw(st.sampled_from(sorted(self.routed)))]
        ref = data.draw(st.sampled_from([ref for ref in (route.prefill, route.decode) if ref]))
        outcome = Outcome(request_id=route.key.request_id, attempt=route.key.attempt, kind=kind, tokens_generated=3)
        self.step(OutcomeReported(ref=ref, outcome=outcome))

    @rule(name=NAMES, request_id=REQUESTS, attempt=st.integers(1, 3), kind=st.sampled_from(OutcomeKind))
    def report_stale_outcome(self, name: str, request_id: str, attempt: int, kind: OutcomeKind) -> None:
        ref = InstanceRef(name, 0)
        self.step(OutcomeReported(ref=ref, outcome=Outcome(request_id=request_id, attempt=attempt, kind=kind)))

    @precondition(lambda self: self.members)
    @rule(data=st.data(), sequence=st.integers(1, 6), prefix=PREFIXES, blocks=st.integers(0, 6), snapshot=st.booleans())
    def publish(self, data: st.DataObject, sequence: int, prefix: str, blocks: int, snapshot: bool) -> None:
        ref = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        events = [BlocksCleared(), BlocksStored(b"", chain(prefix, blocks))] if snapshot else []
        self.step(
            KvPublished(batch=KvEventBatch(ref, sequence, events, snapshot)),
            LoadReported(report=load(ref, sequence + 1, running=blocks % 2, tokens_queued=blocks)),
        )

    @rule(us=st.sampled_from([0, 1_000, 200_000, 5_000_000, 200_000_000]))
    def pass_time(self, us: int) -> None:
        self.now_us += us
        self.step(Tick())

    @invariant()
    def each_accepted_attempt_is_in_one_place(self) -> None:
        assert self.core.requests_queued == len(self.waiting)
        assert self.core.attempts_live == len(self.routed)
        assert not self.ended & (self.waiting | self.routed.keys())

    @invariant()
    def books_balance(self) -> None:
        self.core.check()
        if not self.routed:
            for instance in self.core.fleet.instances.values():
                assert (instance.booked_tokens, instance.booked_pages, instance.booked_rows) == (0, 0, 0)

    @invariant()
    def wakeups_lie_ahead(self) -> None:
        wakeup = self.core.next_wakeup()
        assert wakeup is None or wakeup > self.now_us


TestConductorMachine = ConductorMachine.TestCase
TestConductorMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
