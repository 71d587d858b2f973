"""One instance, put together: engine, core, sockets, streams; and its life from start to clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import segue
from kvstore.connectors.choice import make_mover
from kvstore.connectors.process_identity import boot_id
from kvstore.directory_choice import open_directory
from kvstore.directory_members import ConductorMembers
from kvstore.events_zmq import EventPublisher
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import WorkerConfig
from segue.handoff import HandoffTiming
from segue.ids import InstanceRef
from segue.manifest import InstanceManifest, Role
from segue.plan import PlanResult
from worker_runtime.addresses import listen_address
from worker_runtime.conductors import Conductors
from worker_runtime.effects import Effects
from worker_runtime.engine_loading import LoadedEngine, LoadEngine
from worker_runtime.engine_thread import EngineThread
from worker_runtime.events import Drain, PlanFinished, Stopping, WorkerCore
from worker_runtime.load_reports import LoadReporter
from worker_runtime.loop import WorkerLoop, monotonic_us
from worker_runtime.peer_connections import PeerConnections
from worker_runtime.recording import Recorder
from worker_runtime.rpc_control import ConductorLink
from worker_runtime.rpc_tokens import TokenStreams
from worker_runtime.watchdog import LOOK_S, InstanceUnfit, ReplacementWait

log = logging.getLogger(__name__)

MakeCore = Callable[[InstanceRef, BatchPlanner, BlockPool, HandoffTiming, WorkerConfig], WorkerCore]
OnReady = Callable[[dict[str, str]], None]

DRAIN_NOTICE_S = 0.1
"""For the word to reach the Conductors: an assignment that crosses it is served, not refused."""

DRAIN_LOOK_S = 0.02

FAREWELL_S = 0.3
"""Time for the last messages (aborts, outcomes) to leave before sockets close."""


def serve(
    config: WorkerConfig,
    stop: threading.Event,
    on_ready: OnReady,
    make_core: MakeCore,
    load: LoadEngine,
    record: Path | None = None,
    drain: threading.Event | None = None,
) -> None:
    """Run one instance until `stop`, or until it has drained. `on_ready` is called once, when a first Conductor has
    registered it.

    Raises ConfigError at start, and whatever made the engine fail.
    """
    ref = InstanceRef(config.uuid, time.time_ns() // 1000)
    loaded = load(config, ref)
    try:
        instance = partial(Instance, config, ref, loaded, on_ready, make_core, record)
        asyncio.run(_serve(instance, stop, drain))
    finally:
        loaded.engine.close()
        if loaded.segment is not None:
            loaded.segment.close()


async def _serve(make: Callable[[], Instance], stop: threading.Event, drain: threading.Event | None) -> None:
    instance = make()
    stopped = asyncio.Event()
    _forward(stop, stopped.set)
    if drain is not None:
        _forward(drain, instance.draining.set)
    try:
        await instance.run(stopped)
    finally:
        await instance.close()


def _forward(order: threading.Event, call: Callable[[], None]) -> None:
    """Call on this loop when another thread, or a signal handler, sets `order`."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        order.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    threading.Thread(target=wait, name="order", daemon=True).start()


class Instance:
    """The composition of one worker. Everything in it belongs to one asyncio loop, but for the engine's thread."""

    def __init__(
        self,
        config: WorkerConfig,
        ref: InstanceRef,
        loaded: LoadedEngine,
        on_ready: OnReady,
        make_core: MakeCore,
        record: Path | None,
    ) -> None:
        engine = loaded.engine
        timing = HandoffTiming(lease_us=config.scheduler.handoff_lease_ms * 1000)
        self._config, self._ref, self._on_ready = config, ref, on_ready
        self._ready = False
        self.draining = asyncio.Event()
        """Set by whoever wants the instance to leave: it takes nothing new and ends when it holds nothing any more."""
        self._pool = BlockPool(engine.pages_total, engine.layout.block_size, config.scheduler.prefix_caching)
        planner = BatchPlanner(self._pool, _planner_limits(config, engine.card.max_model_len), engine.card.eos_ids)
        self._core = make_core(ref, planner, self._pool, timing, config)
        self._recorder = Recorder(record) if record is not None else None

        loop = asyncio.get_running_loop()
        self._engine = EngineThread(engine, self._on_result, lambda error: self._loop.fail_threadsafe(error))
        self._mover = make_mover(
            "shared_memory" if config.role is Role.AGGREGATED else config.scheduler.kv_connector,
            ref,
            loaded.pages if loaded.pages is not None else memoryview(b""),
            engine.layout.page_bytes,
            segment=loaded.segment,
            listen_host=config.bind_host if config.role is Role.DECODE else None,
            on_done=lambda: _call_if_open(loop, self._effects.collect_moves),
            device_pages=loaded.device_pages,
        )
        self._publisher = EventPublisher(ref, self._pool.snapshot_events)
        self._peers = PeerConnections(ref, self._mover, lambda event: self._loop.post(event))
        self._tokens = TokenStreams(ref, config.name, timing.lease_us / 1e6, lambda event: self._loop.post(event))
        manifest = self._peers.manifest = self._manifest(loaded)
        self._conductors = Conductors(
            config.conductors, lambda address: self._link(address, manifest, loaded), _members(config)
        )
        self._effects = Effects(
            engine=self._engine,
            mover=self._mover,
            peers=self._peers,
            tokens=self._tokens,
            conductors=self._conductors.links,
            publisher=self._publisher,
            post=lambda event: self._loop.post(event),
        )
        self._loop = WorkerLoop(self._core, self._effects.table(), self._recorder)
        self._reporter = LoadReporter(ref, self._core, self._pool, self._publisher)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, stopped: asyncio.Event) -> None:
        self._engine.start()
        self._tasks = [asyncio.create_task(self._conductors.run())]
        self._tasks.append(asyncio.create_task(self._reporter.run()))
        self._tasks.append(asyncio.create_task(self._watch()))
        self._tasks.append(asyncio.create_task(self._drain()))
        work = asyncio.create_task(self._loop.run(stopped))
        done, _ = await asyncio.wait([work, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        for task in done:
            task.result()

    async def _watch(self) -> None:
        """Raises InstanceUnfit when this process has to be replaced."""
        replacement = ReplacementWait()
        while True:
            await asyncio.sleep(LOOK_S)
            if reason := self._engine.watch.look():
                raise InstanceUnfit(reason)
            if replacement.look(asked=self._effects.needs_restart, running=self._core.load().running):
                raise InstanceUnfit("it asked to be replaced, and nothing runs here any more")

    async def _drain(self) -> None:
        """Ends when the instance may leave. The Conductors hear of it first: what they assigned until then is taken."""
        await self.draining.wait()
        log.info("draining for up to %g s", self._config.scheduler.drain_s)
        for link in self._conductors.links.values():
            link.nudge()
        await asyncio.sleep(DRAIN_NOTICE_S)
        self._loop.post(Drain())
        try:
            async with asyncio.timeout(self._config.scheduler.drain_s):
                while self._core.live() or not self._tokens.is_delivered:
                    await asyncio.sleep(DRAIN_LOOK_S)
        except TimeoutError:
            log.warning("not drained in time: what still runs is planned again elsewhere")

    async def close(self) -> None:
        """Tell everybody, let the last messages leave, then close from the edge inwards."""
        self._loop.post(Stopping("instance is stopping"))
        self._loop.step()
        await asyncio.sleep(FAREWELL_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._conductors.close()
        await self._tokens.close()
        await asyncio.to_thread(self._engine.stop)
        self._peers.close()
        self._publisher.close()
        self._mover.close()
        if self._recorder is not None:
            self._recorder.close()

    def _link(self, address: str, manifest: InstanceManifest, loaded: LoadedEngine) -> ConductorLink:
        return ConductorLink(
            address,
            manifest,
            loaded.engine.card,
            post=lambda event: self._loop.post(event),
            resync=self._publisher.resync,
            on_registered=self._on_registered,
            on_refused=lambda conductor, reason: log.error("conductor %s refuses: %s", conductor, reason),
            steps=lambda: self._engine.steps,
            is_draining=lambda: self.draining.is_set() or self._core.load().draining,
            on_drain=self.draining.set,
            live=lambda: self._core.live(address),
        )

    def _manifest(self, loaded: LoadedEngine) -> InstanceManifest:
        config, engine = self._config, loaded.engine
        return InstanceManifest(
            ref=self._ref,
            name=config.name,
            role=config.role,
            host=boot_id(),
            pid=os.getpid(),
            model=config.model.name or engine.card.name,
            card_digest=engine.card.digest,
            kv_root=engine.kv_root.hex(),
            numerics=engine.numerics,
            layout=engine.layout,
            pages_total=engine.pages_total,
            max_model_len=engine.card.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            control_address=self._peers.channel.listen(listen_address(config, self._ref, "control")),
            events_address=self._publisher.bind(listen_address(config, self._ref, "events")),
            version=getattr(segue, "__version__", ""),
        )

    def _on_result(self, result: PlanResult) -> None:
        """In the engine's thread."""
        self._reporter.note_step(result.elapsed_us, result.steps)
        self._loop.post_threadsafe(PlanFinished(result))

    def _on_registered(self, conductor: str, address: str) -> None:
        if not self._ready:
            self._ready = True
            self._on_ready({"name": self._config.name, "conductor": conductor, "uuid": self._ref.uuid})


def _members(config: WorkerConfig) -> ConductorMembers | None:
    """None without a shared directory: the embedded one is the Conductor's own."""
    if not config.directory.redis_url:
        return None
    return ConductorMembers(open_directory(config.directory, monotonic_us), lease_ms=config.directory.lease_ms)


def _planner_limits(config: WorkerConfig, max_model_len: int) -> PlannerLimits:
    scheduler = config.scheduler
    return PlannerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        pipeline_depth=scheduler.pipeline_depth,
        steps_max=scheduler.steps_max,
        tokens_saturating=scheduler.tokens_saturating,
    )


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
