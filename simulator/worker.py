"""The edge of one simulated instance: gathers events, steps its production core, carries out the decisions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from conductor.core.events import KvPublished, LoadReported, OutcomeReported
from kvstore.events import EventLog
from segue import handoff_messages as wire
from segue.block_hash import block_hashes
from segue.block_pool import BlockPool
from segue.errors import InternalError
from segue.ids import InstanceRef
from segue.kv_events import BlocksRemoved, LoadReport, PublishedMessage
from segue.manifest import InstanceManifest
from segue.plan import BatchPlan
from simulator.event_heap import Rank
from simulator.parts import Parts, SimEngine
from simulator.tiers import LowerTiers
from worker_runtime import events as ev

STEP_MEAN_WEIGHT = 0.1
BUSY_BIN_US = 10_000_000
"""Resolution of the load over time."""

_CHANGES_BATCH = (wire.PrefillDone, wire.DoneAtP, wire.Abort, wire.AbortAck, wire.Stale)


class Worker:
    """`report_us`: interval of load reports. `view_delay_us`: how old KV events and reports are when they
    arrive. `lower`: memory below its GPU. `checked`: the core's invariants are checked after every step."""

    def __init__(
        self,
        manifest: InstanceManifest,
        core: ev.WorkerCore,
        pool: BlockPool,
        engine: SimEngine,
        parts: Parts,
        *,
        report_us: int,
        view_delay_us: int = 0,
        lower: LowerTiers | None = None,
        checked: bool = False,
    ) -> None:
        self.manifest = manifest
        self.core = core
        self.pool = pool
        self.engine = engine
        self.alive = True
        self.busy_us: Counter[int] = Counter()
        """Engine time by bin of BUSY_BIN_US."""
        self.restart_asked = False
        self.tokens_brought: Counter[str] = Counter()
        """Prompt tokens copied to the GPU's cache for a request, by tier they came from."""
        self.fetch_us = 0
        """Time that requests waited for such copies."""
        self._lower = lower
        self._parts = parts
        self._ref = manifest.ref
        self._log = EventLog(manifest.ref)
        self._report_us = report_us
        self._view_delay_us = view_delay_us
        self._checked = checked
        self._paused_until_us = 0
        self._inbox: list[ev.Event] = []
        self._stepping = False
        self._wakeup_us: int | None = None
        self._plans: deque[BatchPlan] = deque()
        self._plan_version = 0
        self._step_us = 0.0
        self._token_times_us: list[int] = []
        """Step ends of the plan that has just landed; the next plan is launched before its tokens are pushed."""
        self._effects: dict[type, Callable[[Any], None]] = {
            ev.RunPlan: self._run_plan,
            ev.MovePages: self._move_pages,
            ev.CancelMove: lambda _: None,  # as the live mover may: what has begun is finished
            ev.LendPages: lambda _: None,
            ev.OpenLink: self._open_link,
            ev.SendPeer: self._send_peer,
            ev.PushTokens: self._push_tokens,
            ev.PublishKv: self._publish_kv,
            ev.Report: self._report_outcome,
            ev.Fence: self._fence,
            ev.RestartNeeded: self._note_restart,
        }

    # -- life

    def start(self) -> None:
        self._report_load()

    def kill(self) -> None:
        """The process ends: nothing of it happens any more."""
        self.alive = False
        self._inbox.clear()
        self._plans.clear()

    def pause(self, until_us: int) -> None:
        """The process hangs: what arrives waits, what is due is late."""
        self._paused_until_us = until_us

    def post(self, event: ev.Event) -> None:
        """Heard in the step at this very time, with whatever else comes now; an assignment when its prompt has
        come up from the tiers below."""
        if not self.alive:
            return
        if self._lower is not None and isinstance(event, ev.Assigned) and self._prefills(event):
            self._bring_up(self._lower, event)
        else:
            self._hear(event)

    def _hear(self, event: ev.Event) -> None:
        self._inbox.append(event)
        if not self._stepping:
            self._stepping = True
            self._parts.heap.push(self._parts.heap.now_us, Rank.WORKER, self._step)

    def resync(self, sequence_seen: int) -> None:
        """Repeat what was published after `sequence_seen`, or everything."""
        replay = self._log.after(sequence_seen)
        if replay is None:
            self._publish(self._log.batches(self.pool.snapshot_events(), snapshot=True))
        else:
            self._publish(replay)

    def fetch(self, source: str, hashes: list[bytes], then: Callable[[], None]) -> None:
        """What a KV store in front of the instance would do. Room is looked for when the bytes have arrived; the blocks
        come in as cache, like those of a request that has ended."""
        missing = len(hashes) - len(self.pool.match(hashes))
        if not missing:
            then()
            return
        size_bytes = missing * self.manifest.layout.page_bytes
        asked_us = self._parts.heap.now_us

        def landed() -> None:
            if self.alive:
                self.tokens_brought["peer"] += len(self._keep(hashes)) * self.pool.block_size
                self.fetch_us += self._parts.heap.now_us - asked_us
                then()

        self._parts.links.send(source, self._ref.uuid, size_bytes, landed)

    def _prefills(self, event: ev.Assigned) -> bool:
        prefill = event.assign.prefill
        return prefill is None or prefill.ref == self._ref

    def _bring_up(self, lower: LowerTiers, event: ev.Assigned) -> None:
        assign, now_us = event.assign, self._parts.heap.now_us
        hashes = block_hashes(assign.hash_root, assign.token_ids, self.pool.block_size)
        held = len(self.pool.match(hashes))
        levels = lower.locate(hashes[held:])
        if not levels:
            self._hear(event)
            return
        end_us = lower.read(levels, now_us)

        def landed() -> None:
            if self.alive:
                kept = self._keep(hashes[: held + len(levels)])
                for tier, blocks in lower.names(levels[place - held] for place in kept if place >= held).items():
                    self.tokens_brought[tier] += blocks * self.pool.block_size
                self.fetch_us += end_us - now_us
                self._hear(event)

        self._parts.heap.push(end_us, Rank.NETWORK, landed)

    def _keep(self, hashes: list[bytes]) -> range:
        """Blocks become cache, as far as there is room; the places in `hashes` of those that were not held."""
        held = self.pool.match(hashes)
        self.pool.acquire(held)
        room = min(len(hashes) - len(held), self.pool.pages_allocatable)
        pages = self.pool.allocate(room)
        for place, page in enumerate(pages, len(held)):
            self.pool.publish(page, hashes[place], hashes[place - 1] if place else b"")
        self.pool.release(held + pages)
        return range(len(held), len(held) + room)

    # -- stepping

    def _step(self) -> None:
        if not self.alive:
            return
        if self._parts.heap.now_us < self._paused_until_us:
            self._parts.heap.push(self._paused_until_us, Rank.WORKER, self._step)
            return
        self._stepping = False
        events, self._inbox = self._inbox, []
        decisions = self.core.step(self._parts.heap.now_us, events)
        for decision in decisions:
            self._effects[type(decision)](decision)
        if self._checked:
            self.core.check()
        if self.engine.is_busy and (_change_batch(events) or _computes_rest(decisions)):
            self._truncate()
        self._plan_wakeup()

    def _plan_wakeup(self) -> None:
        """At most one timer is kept; one that fires early asks the core again."""
        wakeup_us = self.core.next_wakeup()
        if wakeup_us is None:
            return
        wakeup_us = max(wakeup_us, self._parts.heap.now_us)
        if self._wakeup_us is None or wakeup_us < self._wakeup_us:
            self._wakeup_us = wakeup_us
            self._parts.heap.push(wakeup_us, Rank.TIMER, lambda: self._wake(wakeup_us))

    def _wake(self, planned_us: int) -> None:
        if self._wakeup_us != planned_us or not self.alive:
            return
        self._wakeup_us = None
        wanted_us = self.core.next_wakeup()
        if wanted_us is not None and wanted_us <= self._parts.heap.now_us:
            self._step()
        else:
            self._plan_wakeup()

    # -- the engine

    def _run_plan(self, decision: ev.RunPlan) -> None:
        self._plans.append(decision.plan)
        if not self.engine.is_busy:
            self._launch()

    def _launch(self) -> None:
        end_us = self.engine.launch(self._plans.popleft(), self._parts.heap.now_us)
        self._await_plan(end_us)

    def _await_plan(self, end_us: int) -> None:
        self._plan_version += 1
        version = self._plan_version
        self._parts.heap.push(end_us, Rank.ENGINE, lambda: self._plan_done(version))

    def _truncate(self) -> None:
        end_us = self.engine.truncate(self._parts.heap.now_us)
        if end_us is not None:
            self._await_plan(end_us)

    def _plan_done(self, version: int) -> None:
        if version != self._plan_version or not self.alive:
            return
        result = self.engine.collect()
        step_us = result.elapsed_us / result.steps
        weight = 1.0 - (1.0 - STEP_MEAN_WEIGHT) ** result.steps if self._step_us else 1.0
        self._step_us += (step_us - self._step_us) * weight
        self._note_busy(result.elapsed_us)
        self._token_times_us = self.engine.step_ends_us
        self.post(ev.PlanFinished(result))
        if self._plans:
            self._launch()

    def _note_busy(self, elapsed_us: int) -> None:
        """The engine was busy for so long until now."""
        now_us = self._parts.heap.now_us
        begin_us = now_us - elapsed_us
        while begin_us < now_us:
            end_us = min(now_us, (begin_us // BUSY_BIN_US + 1) * BUSY_BIN_US)
            self.busy_us[begin_us // BUSY_BIN_US] += end_us - begin_us
            begin_us = end_us

    # -- pages

    def _move_pages(self, decision: ev.MovePages) -> None:
        size_bytes = len(decision.pages) * self.manifest.layout.page_bytes
        self._parts.links.send(self._ref.uuid, decision.target.uuid, size_bytes, lambda: self._pages_landed(decision))

    def _pages_landed(self, decision: ev.MovePages) -> None:
        target = self._parts.worker(decision.target)
        if not self.alive:
            return
        if target is None:
            self.post(ev.PagesMoved(decision.op, 0, "the target is gone"))
            return
        arriving = self._parts.network.weather.pages_arriving(len(decision.pages))
        for source_page, target_page in decision.pages[:arriving]:
            if self._checked and not target.pool.is_closed(target_page):
                raise InternalError(
                    f"{self._ref} writes page {target_page} of {decision.target}, which is in use there"
                )
            target.engine.copy_page(self.engine, source_page, target_page)
        error = "" if arriving == len(decision.pages) else "the copy failed"
        self.post(ev.PagesMoved(decision.op, arriving, error))

    def _fence(self, decision: ev.Fence) -> None:
        """As with shared memory: only the end of the peer's process proves that it writes no more."""
        self.post(ev.Fenced(decision.op, decision.peer, self._parts.worker(decision.peer) is None))

    # -- messages

    def _open_link(self, decision: ev.OpenLink) -> None:
        peer = decision.peer.ref
        self._parts.network.stream(self._ref.uuid, peer.uuid, lambda: self._greet(peer))

    def _greet(self, peer: InstanceRef) -> None:
        target = self._parts.worker(peer)
        if target is None:
            self.post(ev.LinkRefused(peer, "no such instance"))
        else:
            target.post(ev.LinkReady(self._ref))
            self.post(ev.LinkReady(peer))

    def _send_peer(self, decision: ev.SendPeer) -> None:
        message = decision.message
        parts = self._parts

        def deliver() -> None:
            target = parts.worker(message.target)
            if target is not None:
                target.post(ev.PeerMessage(message))

        parts.network.datagram(self._ref.uuid, message.target.uuid, deliver)

    def _push_tokens(self, decision: ev.PushTokens) -> None:
        front = self._parts.front(decision.gateway)
        times_us, deltas = self._token_times_us, decision.deltas
        ref, name = self._ref, self.manifest.name

        def deliver() -> None:
            for delta in deltas:
                front.receive(ref, name, delta, times_us)

        self._parts.network.stream(ref.uuid, decision.gateway, deliver)
        if self._parts.network.weather.replays():
            self._parts.network.stream(ref.uuid, decision.gateway, deliver)

    def _report_outcome(self, decision: ev.Report) -> None:
        conductor = self._parts.conductor(decision.conductor)
        if conductor is not None:
            event = OutcomeReported(ref=self._ref, outcome=decision.outcome)
            self._parts.network.stream(self._ref.uuid, decision.conductor, lambda: conductor.post(event))

    def _note_restart(self, _: ev.RestartNeeded) -> None:
        self.restart_asked = True

    # -- what everybody is told

    def _publish_kv(self, decision: ev.PublishKv) -> None:
        if self._lower is not None:
            for event in decision.events:
                if isinstance(event, BlocksRemoved):
                    self._lower.put(event.hashes)
        self._publish(self._log.batches(decision.events))

    def _publish(self, messages: Any) -> None:
        for message in messages:
            for conductor in self._parts.conductors():
                self._tell(conductor.name, conductor.post, message)

    def _tell(self, name: str, post: Callable[[Any], None], message: PublishedMessage) -> None:
        event = LoadReported(report=message) if isinstance(message, LoadReport) else KvPublished(batch=message)
        self._parts.network.datagram(self._ref.uuid, name, lambda: post(event), extra_us=self._view_delay_us)

    def _report_load(self) -> None:
        if not self.alive:
            return
        if self._parts.heap.now_us < self._paused_until_us:
            self._parts.heap.push(self._paused_until_us, Rank.TIMER, self._report_load)
            return
        load, counts = self.core.load(), self.pool.counts()
        report = LoadReport(
            ref=self._ref,
            sequence=self._log.sequence + 1,
            running=load.running,
            waiting=load.waiting,
            tokens_queued=load.tokens_queued,
            tokens_running=load.tokens_running,
            pages_free=counts.free,
            pages_active=counts.active,
            pages_cached=counts.cached,
            pages_held=counts.held,
            pages_quarantined=counts.quarantined,
            pages_total=counts.total,
            step_us=int(self._step_us),
            preemptions=load.preemptions,
            draining=load.draining,
        )
        self._publish([self._log.numbered(report)])
        self._parts.heap.push(self._parts.heap.now_us + self._report_us, Rank.TIMER, self._report_load)


def _change_batch(events: list[ev.Event]) -> bool:
    """Whether the next plan must know of one of these: the running one is cut short."""
    for event in events:
        if isinstance(event, ev.PeerMessage):
            if isinstance(event.message, _CHANGES_BATCH):
                return True
        elif isinstance(event, ev.Assigned):
            if event.assign.prefill is None:
                return True
        elif not isinstance(event, ev.LinkReady | ev.PagesMoved | ev.PlanFinished):
            return True
    return False


def _computes_rest(decisions: list[ev.Decision]) -> bool:
    """A decode instance that says Empty has work of its own now."""
    return any(isinstance(each, ev.SendPeer) and isinstance(each.message, wire.Empty) for each in decisions)
