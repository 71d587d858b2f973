"""A whole simulated cluster, put together: production cores, a virtual clock, a workload."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from conductor.core.admission import Objectives
from conductor.core.beliefs import Beliefs
from conductor.core.events import InstanceJoined
from conductor.core.links import LinkBook
from conductor.core.machine import ConductorCore
from conductor.core.pricing import Targets
from decode_worker.core.core import DecodeCore
from prefill_worker.core.core import PrefillCore
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.cost_model import CostModel, LinkCost
from segue.handoff import HandoffTiming
from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from simulator.conductor import Conductor
from simulator.cost_engine import CostEngine
from simulator.event_heap import EventHeap
from simulator.links import SharedLinks
from simulator.network import Calm, Network
from simulator.parts import ConductorPort, FrontPort, WorkerPort
from simulator.policies import PolicyContext, make_policy
from simulator.prompt_tokens import EOS, PromptTokens
from simulator.tiers import LowerTiers, TierSpec, check_tier
from simulator.trace_front import TraceFront
from simulator.worker import Worker
from simulator.workload import Workload
from worker_runtime.events import WorkerCore

MODEL = "simulated"
HASH_ROOT = bytes(32)
STEPS_MAX = 64
"""Decode steps in one plan: pages for all of them are taken in advance, which matters only when pages are short."""


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, beside the workload and the policy."""

    prefill: int = 8
    decode: int = 8
    aggregated: int = 0
    cost: CostModel
    link: LinkCost
    kv_tokens: int
    """K/V tokens that each instance holds, cache included."""
    tiers: tuple[TierSpec, ...] = ()
    """Memory of each instance below its GPU, from the fastest on."""
    block_size: int = 512
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    max_model_len: int = 1 << 18
    tokens_output_max: int = 4_096
    """What every client asks for at most: nobody but the engine knows better. 0: each asks for what it will get."""
    targets: Targets = Targets()
    """Objectives that a policy may weigh latencies by."""
    refuse_ttft_us: float = float("inf")
    refuse_tpot_us: float = float("inf")
    """Opponents that reject by prediction do so beyond these."""
    uniform_decode_us: float = 10_000_000.0
    """What `mooncake-predicted` takes every decode to last."""
    objectives: Objectives | None = None
    """Our own admission predicts and rejects by these; None: everything is admitted that fits."""
    tenants: bool = False
    """The group of a request is its tenant."""
    tenant_weights: dict[str, float] = {}
    queue_max: int = 1 << 20
    """Requests that may wait in one Conductor."""
    fetches: bool = True
    """Whether instances can copy prefixes from each other."""
    conductors: int = 1
    view_delay_us: int = 0
    report_us: int = 1_000_000
    lease_us: int = 60_000_000
    noise: float = 0.0
    """Relative standard deviation of step times."""
    seed: int = 0


def check_spec(spec: ClusterSpec) -> None:
    """Raises ValueError for a cluster that could serve nothing, or a number that means nothing."""
    pairs = spec.prefill > 0 and spec.decode > 0
    if min(spec.prefill, spec.decode, spec.aggregated) < 0 or not (pairs or spec.aggregated or spec.decode):
        raise ValueError("a cluster needs prefill and decode instances, or aggregated ones")
    if spec.decode and not spec.prefill:
        raise ValueError("a cluster needs prefill instances for its decode instances; aggregated ones do both")
    for field in ("kv_tokens", "block_size", "max_num_seqs", "max_num_batched_tokens", "conductors"):
        least = spec.block_size if field == "kv_tokens" else 1
        if getattr(spec, field) < least:
            raise ValueError(f"{field} must be at least {least}, got {getattr(spec, field)}")
    if spec.view_delay_us < 0:
        raise ValueError(f"view_delay_us must be at least 0, got {spec.view_delay_us}")
    for tier in spec.tiers:
        check_tier(tier, spec.block_size)
    if not 0.0 <= spec.noise < 1.0:
        raise ValueError(f"noise must be between 0 and 1, got {spec.noise}")


class Cluster:
    """Implements `simulator.parts.Parts`. Every Conductor gets a policy of its own, by name."""

    def __init__(self, spec: ClusterSpec, workload: Workload, policy: str = "segue") -> None:
        self.spec = spec
        self.workload = workload
        self.heap = EventHeap()
        self.network = Network(self.heap, Calm())
        self.links = SharedLinks(self.heap, lambda _: spec.link)
        self._layout = _layout(spec)
        self._conductors = {f"conductor-{n}": self._make_conductor(n, policy) for n in range(spec.conductors)}
        self._outputs = [request.tokens_output for request in workload.requests]
        roles = [(Role.PREFILL, spec.prefill), (Role.DECODE, spec.decode), (Role.AGGREGATED, spec.aggregated)]
        self.workers = [self._make_worker(role, number) for role, count in roles for number in range(count)]
        self._by_ref = {worker.manifest.ref: worker for worker in self.workers}
        tokens = PromptTokens(workload)
        self.fronts = [
            TraceFront(
                f"front-{number}",
                workload,
                tokens,
                conductor,
                self.heap,
                model=MODEL,
                block_size=spec.block_size,
                hash_root=HASH_ROOT,
                tokens_max=spec.tokens_output_max,
                start=number,
                stride=spec.conductors,
                tenants=spec.tenants,
            )
            for number, conductor in enumerate(self._conductors.values())
        ]
        self._fronts = {front.name: front for front in self.fronts}

    def run(self, on_progress: Callable[[int, int], None] | None = None, *, until_us: int | None = None) -> None:
        """Until every request has ended, or `until_us`. `on_progress(ended, total)` is called now and then."""
        for worker in self.workers:
            for conductor in self._conductors.values():
                conductor.post(InstanceJoined(manifest=worker.manifest))
            worker.start()
        total = len(self.workload.requests)
        while (ended := sum(front.ended for front in self.fronts)) < total:
            for _ in range(1_000):
                if not self.heap.run_next():
                    raise AssertionError(f"nothing happens any more, but {total - ended} requests have not ended")
                if until_us is not None and self.heap.now_us >= until_us:
                    return
            if on_progress is not None:
                on_progress(ended, total)

    # -- Parts

    def worker(self, ref: InstanceRef | None) -> WorkerPort | None:
        return None if ref is None else self._by_ref.get(ref)

    def conductors(self) -> list[ConductorPort]:
        return list(self._conductors.values())

    def conductor(self, name: str) -> Conductor | None:
        return self._conductors.get(name)

    def front(self, name: str) -> FrontPort:
        return self._fronts[name]

    # -- putting together

    def _make_conductor(self, number: int, policy: str) -> Conductor:
        spec = self.spec
        context = PolicyContext(
            cost=spec.cost,
            link=spec.link,
            seed=spec.seed * 1_000 + number,
            slo_ttft_us=spec.refuse_ttft_us,
            slo_tpot_us=spec.refuse_tpot_us,
            uniform_decode_us=spec.uniform_decode_us,
        )
        beliefs = Beliefs(cost=spec.cost, links=LinkBook(spec.link), targets=spec.targets)
        core = ConductorCore(
            policy=make_policy(policy, context),
            queue_max=spec.queue_max,
            beliefs=beliefs,
            objectives=spec.objectives,
            cost=spec.cost,
            tenant_weights=spec.tenant_weights,
        )
        return Conductor(f"conductor-{number}", core, self, context.notes)

    def _make_worker(self, role: Role, number: int) -> Worker:
        spec, name = self.spec, f"{role}-{number}"
        ref = InstanceRef(name, 1)
        pool = BlockPool(max(1, spec.kv_tokens // spec.block_size), spec.block_size)
        limits = PlannerLimits(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            steps_max=STEPS_MAX,
        )
        planner = BatchPlanner(pool, limits, (EOS,))
        timing = HandoffTiming(lease_us=spec.lease_us)
        core: WorkerCore
        if role is Role.PREFILL:
            core = PrefillCore(ref, planner, pool, timing, spec.max_num_batched_tokens)
        else:
            core = DecodeCore(ref, planner, pool, timing)
        engine = CostEngine(spec.cost, self._outputs, spec.noise, seed=spec.seed * 1_000 + len(name) * 100 + number)
        manifest = self._manifest(ref, role, pool.pages_total)
        lower = LowerTiers(spec.tiers, spec.block_size, self._layout.page_bytes) if spec.tiers else None
        return Worker(
            manifest,
            core,
            pool,
            engine,
            self,
            report_us=spec.report_us,
            view_delay_us=spec.view_delay_us,
            lower=lower,
        )

    def _manifest(self, ref: InstanceRef, role: Role, pages_total: int) -> InstanceManifest:
        spec = self.spec
        return InstanceManifest(
            ref=ref,
            name=ref.uuid,
            role=role,
            host="simulated",
            pid=0,
            model=MODEL,
            card_digest="",
            kv_root=HASH_ROOT.hex(),
            layout=self._layout,
            pages_total=pages_total,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            control_address=f"sim://{ref.uuid}",
            events_address=f"sim://{ref.uuid}/events",
            fetches=spec.fetches,
        )


def _layout(spec: ClusterSpec) -> KvLayout:
    """A layout whose page has the right number of bytes; what is in it does not matter here."""
    return KvLayout(
        layers=spec.cost.kv_token_bytes // 2, kv_heads=1, head_dim=1, block_size=spec.block_size, dtype="float8_e4m3fn"
    )
