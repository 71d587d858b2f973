"""Small clusters in which everything goes wrong by a seed, and what must hold all the same.

A seed makes a cluster, requests and misfortunes: lost, doubled, late and reordered messages, replayed tokens, copies
that fail half-way, pairs cut off, hanging and slow instances, crashes and restarts at the same address, control streams
that break, clients that go away. Then everything heals. Checked:

- at every step: the invariants of the core that stepped (`check`);
- at every token: it is the model's, comes once and in order, and nothing comes after the one end (`Oracle`; the toy
  engine's tokens are right only if every page held the right K/V);
- after healing: every request ends within `PATIENCE_US`; then nothing is left: no attempt, no booked capacity, and
  every page is free or cached.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable

import msgspec

from conductor.core.events import InstanceJoined, InstanceLost
from conductor.core.machine import ConductorCore
from decode_worker.core.core import DecodeCore
from prefill_worker.core.core import PrefillCore
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.cost_model import LinkCost
from segue.handoff import HandoffTiming
from segue.ids import InstanceRef
from segue.manifest import InstanceManifest, Role
from simulator.conductor import Conductor
from simulator.event_heap import EventHeap, Rank
from simulator.links import SharedLinks
from simulator.network import Network
from simulator.parts import ConductorPort, FrontPort, WorkerPort
from simulator.session_front import BrokenPromise, ClientRequest, SessionFront
from simulator.toy_clock_engine import ToyClockEngine
from simulator.weather import Storm, StormyWeather
from simulator.worker import Worker
from worker_runtime import events as ev
from worker_runtime.toy_engine import toy_layout

LEASE_US = 1_000_000
HEAL_US = 5_000_000
PATIENCE_US = 150_000_000
"""After healing. The longest honest wait is a full queue of attempts, each refused after half a lease and planned again
behind a hold of at most 3.2 s; the Conductor itself gives up on a request after 120 s."""

QUIET_US = 12 * LEASE_US
EVENTS_MAX = 400_000
BLOCK = 4
HASH_ROOT = bytes(32)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Drawn from a seed; printed when it fails."""

    prefill: int
    decode: int
    pages: int
    max_num_seqs: int
    chunk: int
    depth: int
    steps_max: int
    requests: int
    arrivals_us: int
    """They come within this time: a crowd, or one after the other."""
    step_us_max: int
    link_bytes_us: float
    """A page has 32 bytes: microseconds, or longer than a cancel takes to be overtaken by the next use of its pages."""
    storm: Storm
    crashes: int
    hangs: int
    cuts: int
    broken_streams: int


class Failure(msgspec.Struct, frozen=True):
    seed: int
    message: str


def draw_scenario(source: random.Random) -> Scenario:
    """Each kind of misfortune is absent in some scenarios, so that each also meets a calm rest; some are all misery."""
    misery = source.choice((1, 1, 1, 3))

    def share(most: float) -> float:
        return source.choice((0.0, source.random() * most * misery))

    return Scenario(
        prefill=source.randint(1, 3),
        decode=source.randint(1, 3),
        pages=source.choice((12, 20, 40)),
        max_num_seqs=source.choice((1, 2, 4)),
        chunk=source.choice((4, 8, 24)),
        depth=source.randint(0, 1),
        steps_max=source.choice((1, 1, 3)),
        requests=source.randint(3, 12),
        arrivals_us=source.choice((100_000, 1_000_000, HEAL_US)),
        step_us_max=source.choice((4_000, 30_000)),
        link_bytes_us=source.choice((0.2, 0.2, 0.001)),
        storm=Storm(
            lost=share(0.2),
            doubled=share(0.2),
            late=share(0.3),
            late_us_max=source.choice((5_000, 200_000, 1_500_000)),
            stream_us_max=source.choice((500, 20_000, 300_000)),
            replayed=share(0.2),
            copy_failed=share(0.2),
        ),
        crashes=source.choice((0, 0, 1, 2)) * misery,
        hangs=source.choice((0, 0, 1)) * misery,
        cuts=source.choice((0, 0, 1)) * misery,
        broken_streams=source.choice((0, 0, 1)) * misery,
    )


class FaultCluster:
    """Implements `simulator.parts.Parts`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.scenario = draw_scenario(self._random)
        self.heap = EventHeap()
        self.weather = StormyWeather(self.scenario.storm, self._random, self.heap)
        self.network = Network(self.heap, self.weather)
        link = LinkCost(latency_us=20.0, bytes_per_us=self.scenario.link_bytes_us)
        self.links = SharedLinks(self.heap, lambda _: link)
        self._conductor = Conductor("conductor", ConductorCore(), self, checked=True)
        self._front = SessionFront(
            "front", self._draw_requests(), self._conductor, self.heap, block_size=BLOCK, hash_root=HASH_ROOT
        )
        self._present: dict[str, Worker] = {}
        self._incarnation = 1
        roles = [(Role.PREFILL, self.scenario.prefill), (Role.DECODE, self.scenario.decode)]
        for role, count in roles:
            for number in range(count):
                self._boot(f"{role}-{number}", role)
        self._draw_misfortunes()
        self._replace_asked()

    def run(self) -> None:
        """Raises BrokenPromise, or what a core raises when it finds itself broken."""
        self._run_until(HEAL_US, lambda: False)
        self.weather.calm()
        self._run_until(HEAL_US + PATIENCE_US, lambda: not self._front.unfinished)
        if self._front.unfinished:
            states = {id_: self._front.live[id_].session.state.name for id_ in self._front.unfinished}
            raise BrokenPromise(f"no end {PATIENCE_US / 1e6:g} s after everything healed: {states}")
        self._run_until(self.heap.now_us + QUIET_US, lambda: False)
        self._check_nothing_left()

    def ends(self) -> list[str]:
        return self._front.ends()

    def _run_until(self, end_us: int, done: Callable[[], bool]) -> None:
        while not done() and (next_us := self.heap.next_us) is not None and next_us <= end_us:
            self.heap.run_next()
            if self.heap.executed > EVENTS_MAX:
                raise BrokenPromise(f"{EVENTS_MAX} events: messages or plans go round in a circle")

    def _check_nothing_left(self) -> None:
        core = self._conductor.core
        if core.attempts_live or core.requests_queued:
            raise BrokenPromise(f"the Conductor keeps {core.attempts_live} attempts, {core.requests_queued} waiting")
        for worker in self._present.values():
            counts = worker.pool.counts()
            load = worker.core.load()
            if counts.free + counts.cached != counts.total or load.running or load.waiting:
                raise BrokenPromise(f"{worker.manifest.name} is not idle after everything ended: {counts}, {load}")

    # -- Parts

    def worker(self, ref: InstanceRef | None) -> WorkerPort | None:
        worker = None if ref is None else self._present.get(ref.uuid)
        return worker if worker is not None and worker.manifest.ref == ref else None

    def conductors(self) -> list[ConductorPort]:
        return [self._conductor]

    def conductor(self, name: str) -> ConductorPort | None:
        return self._conductor

    def front(self, name: str) -> FrontPort:
        return self._front

    # -- instances

    def _boot(self, name: str, role: Role) -> None:
        scenario = self.scenario
        ref = InstanceRef(name, self._incarnation)
        pool = BlockPool(scenario.pages, BLOCK)
        limits = PlannerLimits(
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.chunk,
            max_model_len=scenario.pages * BLOCK,
            pipeline_depth=scenario.depth,
            steps_max=scenario.steps_max,
        )
        planner = BatchPlanner(pool, limits, ())
        timing = HandoffTiming(lease_us=LEASE_US)
        core: ev.WorkerCore
        if role is Role.PREFILL:
            core = PrefillCore(ref, planner, pool, timing, scenario.chunk)
        else:
            core = DecodeCore(ref, planner, pool, timing)
        engine = ToyClockEngine(scenario.pages, BLOCK, self._random, scenario.step_us_max)
        manifest = self._manifest(ref, role)
        worker = Worker(manifest, core, pool, engine, self, report_us=500_000, checked=True)
        self._present[name] = worker
        self.network.stream(name, "conductor", lambda: self._conductor.post(InstanceJoined(manifest=manifest)))
        worker.start()

    def _crash(self, name: str, away_us: int) -> None:
        """The process ends, and comes back after `away_us`; others notice by and by."""
        worker = self._present.pop(name, None)
        if worker is None:
            return
        worker.kill()
        ref = worker.manifest.ref
        lost = InstanceLost(ref=ref, reason="crashed")
        self.network.stream(name, "conductor", lambda: self._conductor.post(lost))
        for peer in list(self._present):
            notice_us = self.heap.now_us + self._random.randrange(500_000)
            self.heap.push(notice_us, Rank.NETWORK, lambda peer=peer: self._tell(peer, ev.PeerGone(ref)))  # type: ignore[misc]
        self._incarnation += 1
        self.heap.push(self.heap.now_us + away_us, Rank.TIMER, lambda: self._boot(name, worker.manifest.role))

    def _tell(self, name: str, event: ev.Event) -> None:
        worker = self._present.get(name)
        if worker is not None:
            worker.post(event)

    def _replace_asked(self) -> None:
        """What a launcher owes to an instance that asked to be replaced."""
        for name, worker in list(self._present.items()):
            if worker.restart_asked:
                self._crash(name, 50_000)
        self.heap.push(self.heap.now_us + LEASE_US, Rank.TIMER, self._replace_asked)

    def _break_stream(self, name: str) -> None:
        """Its control stream ends and is opened again: the same incarnation registers anew."""
        worker = self._present.get(name)
        if worker is None:
            return
        manifest = worker.manifest
        lost = InstanceLost(ref=manifest.ref, reason="the stream broke")
        self.network.stream(name, "conductor", lambda: self._conductor.post(lost))
        self.network.stream(name, "conductor", lambda: self._conductor.post(InstanceJoined(manifest=manifest)))

    def _pause(self, name: str, for_us: int) -> None:
        worker = self._present.get(name)
        if worker is not None:
            worker.pause(self.heap.now_us + for_us)

    def _manifest(self, ref: InstanceRef, role: Role) -> InstanceManifest:
        scenario = self.scenario
        return InstanceManifest(
            ref=ref,
            name=ref.uuid,
            role=role,
            host="simulated",
            pid=0,
            model="toy",
            card_digest="",
            kv_root=HASH_ROOT.hex(),
            layout=toy_layout(BLOCK),
            pages_total=scenario.pages,
            max_model_len=scenario.pages * BLOCK,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.chunk,
            control_address=f"sim://{ref.uuid}",
            events_address=f"sim://{ref.uuid}/events",
        )

    # -- what is drawn

    def _draw_requests(self) -> list[ClientRequest]:
        """Prompts that share prefixes: a few roots, cut anywhere, with tails of their own."""
        source, scenario = self._random, self.scenario
        room = scenario.pages * BLOCK
        roots = [[source.randrange(1_000) for _ in range(room)] for _ in range(2)]
        requests = []
        for number in range(scenario.requests):
            max_tokens = source.randint(1, 12)
            length = source.randint(1, room - max_tokens - 1)
            shared = source.randint(0, length)
            prompt = source.choice(roots)[:shared] + [source.randrange(1_000) for _ in range(length - shared)]
            arrival_us = source.randrange(scenario.arrivals_us)
            patience_us = source.choice((150_000, 1_500_000))
            cancel_us = arrival_us + source.randrange(patience_us) if source.random() < 0.25 else 0
            requests.append(
                ClientRequest(
                    request_id=f"r{number}",
                    arrival_us=arrival_us,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    seed=source.randrange(1_000),
                    cancel_us=cancel_us,
                )
            )
        return requests

    def _draw_misfortunes(self) -> None:
        source, scenario, names = self._random, self.scenario, list(self._present)
        for _ in range(scenario.crashes):
            name, away_us = source.choice(names), source.choice((1, 50_000, 2_000_000))
            self._at_some_time(lambda name=name, away_us=away_us: self._crash(name, away_us))  # type: ignore[misc]
        for _ in range(scenario.hangs):
            name, for_us = source.choice(names), source.randrange(3 * LEASE_US)
            self._at_some_time(lambda name=name, for_us=for_us: self._pause(name, for_us))  # type: ignore[misc]
        for _ in range(scenario.broken_streams):
            name = source.choice(names)
            self._at_some_time(lambda name=name: self._break_stream(name))  # type: ignore[misc]
        for _ in range(scenario.cuts):
            pair = source.sample([*names, "conductor"], 2)
            end_us = source.randrange(HEAL_US)
            self._at_some_time(lambda pair=pair, end_us=end_us: self.weather.cut(pair[0], pair[1], end_us))  # type: ignore[misc]

    def _at_some_time(self, action: Callable[[], None]) -> None:
        """Mostly while there is traffic."""
        latest_us = self._random.choice((HEAL_US, 2 * self.scenario.arrivals_us))
        self.heap.push(self._random.randrange(min(HEAL_US, latest_us)), Rank.TIMER, action)


def run_seed(seed: int) -> Failure | None:
    """One scenario from beginning to end; None when everything held."""
    cluster = FaultCluster(seed)
    try:
        cluster.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        at_s = cluster.heap.now_us / 1e6
        return Failure(seed, f"{type(error).__name__} at {at_s:.3f} s ({place}): {error}; {cluster.scenario}")
    return None
