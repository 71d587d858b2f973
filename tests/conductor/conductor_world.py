"""A small cluster for tests of the Conductor core: a clock that is set by hand, and the decisions of each step."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from conductor.core.beliefs import Beliefs
from conductor.core.decisions import Decision
from conductor.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    KvPublished,
    LoadReported,
    OutcomeReported,
    RequestArrived,
    RequestFinished,
    Tick,
)
from conductor.core.machine import ConductorCore
from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.ids import InstanceRef
from segue.kv_events import BlocksStored, KvEventBatch, LoadReport
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from segue.worker_messages import Outcome, OutcomeKind

MODEL = "toy"
BLOCK_SIZE = 4
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, block_size=BLOCK_SIZE, dtype="float32")

COST = CostModel(
    prefill=PrefillCost(base_us=0.0, token_us=1_000.0, pair_us=0.0, floor_us=1_000.0),
    decode=DecodeCost(base_us=1_000.0, row_us=1_000.0, kv_token_us=1.0),
    kv_token_bytes=LAYOUT.page_bytes // BLOCK_SIZE,
)
"""A token of prefill takes a millisecond, and so does a row of a decode step."""

D = TypeVar("D", bound=Decision)


def manifest(name: str, role: Role, **changes: object) -> InstanceManifest:
    base = InstanceManifest(
        ref=InstanceRef(name, 1),
        name=name,
        role=role,
        host="host",
        pid=1,
        model=MODEL,
        card_digest="card",
        kv_root="aa" * 32,
        layout=LAYOUT,
        pages_total=64,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        control_address=f"ipc://{name}",
        events_address=f"ipc://{name}.events",
    )
    return msgspec.structs.replace(base, **changes)


def chain(prefix: str, blocks: int) -> list[bytes]:
    return [f"{prefix}{n}".encode().rjust(16, b"\0") for n in range(blocks)]


def request(request_id: str, tokens: int = 16, max_tokens: int = 8, **changes: object) -> RequestArrived:
    base = RequestArrived(
        request_id=request_id,
        attempt=1,
        model=MODEL,
        tokens_prompt=tokens,
        tokens_known=tokens,
        tokens_max=tokens + max_tokens,
        hash_root=b"root",
        block_hashes=chain(request_id, tokens // BLOCK_SIZE),
    )
    return msgspec.structs.replace(base, **changes)


def load(ref: InstanceRef, sequence: int, **changes: int) -> LoadReport:
    quiet = dict.fromkeys(
        (
            "running",
            "waiting",
            "tokens_queued",
            "tokens_running",
            "pages_free",
            "pages_active",
            "pages_cached",
            "pages_held",
            "pages_quarantined",
            "step_us",
        ),
        0,
    )
    return LoadReport(ref=ref, sequence=sequence, pages_total=64, **(quiet | changes))


class World:
    """Wraps a core; every call is one step, checked afterwards."""

    def __init__(self, core: ConductorCore | None = None) -> None:
        self.core = core or ConductorCore(beliefs=Beliefs(cost=COST))
        self.now_us = 0
        self.refs: dict[str, InstanceRef] = {}

    def step(self, *events: Event) -> list[Decision]:
        decisions = self.core.step(self.now_us, events)
        self.core.check()
        return decisions

    def wait(self, us: int) -> list[Decision]:
        self.now_us += us
        return self.step(Tick())

    def join(self, name: str, role: Role, **changes: object) -> list[Decision]:
        member = manifest(name, role, **changes)
        self.refs[name] = member.ref
        return self.step(InstanceJoined(manifest=member))

    def lose(self, name: str) -> list[Decision]:
        return self.step(InstanceLost(ref=self.refs[name], reason="stream broke"))

    def submit(self, request_id: str, tokens: int = 16, max_tokens: int = 8, **changes: object) -> list[Decision]:
        return self.step(request(request_id, tokens, max_tokens, **changes))

    def finish(self, request_id: str, reason: str = "stop") -> list[Decision]:
        return self.step(RequestFinished(request_id=request_id, reason=reason))

    def outcome(
        self, name: str, request_id: str, kind: OutcomeKind, attempt: int = 1, **more: object
    ) -> list[Decision]:
        outcome = Outcome(request_id=request_id, attempt=attempt, kind=kind, **more)
        return self.step(OutcomeReported(ref=self.refs[name], outcome=outcome))

    def report(self, name: str, sequence: int, **changes: int) -> list[Decision]:
        return self.step(LoadReported(report=load(self.refs[name], sequence, **changes)))

    def publish(self, name: str, sequence: int, hashes: list[bytes], *, snapshot: bool = False) -> list[Decision]:
        events = [BlocksStored(b"", hashes)]
        return self.step(KvPublished(batch=KvEventBatch(self.refs[name], sequence, events, snapshot)))

    def booked(self) -> dict[str, tuple[int, int, int]]:
        """(tokens, pages, rows) booked on each instance."""
        return {
            uuid: (instance.booked_tokens, instance.booked_pages, instance.booked_rows)
            for uuid, instance in self.core.fleet.instances.items()
        }


def only(kind: type[D], decisions: list[Decision]) -> D:
    """The single decision, which must be of `kind`."""
    assert [type(decision) for decision in decisions] == [kind], decisions
    return decisions[0]  # type: ignore[return-value]


def all_of(kind: type[D], decisions: list[Decision]) -> list[D]:
    return [decision for decision in decisions if isinstance(decision, kind)]
