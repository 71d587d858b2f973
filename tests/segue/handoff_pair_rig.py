"""A prefill and a decode core joined in memory, with toy engines, virtual time and a network that a test controls.

The rig carries out decisions as the live loop does, but every effect (a plan, a move, a message) waits in a list until
the test lets it happen. It checks after every step what must hold whatever happens: the joint table, the pools, that a
move writes only pages which D has lent, and that no token position is emitted twice with different tokens.
"""

from __future__ import annotations

from collections import defaultdict

from decode_worker.core.core import DecodeCore
from prefill_worker.core.core import PrefillCore
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_hash import token_bytes
from segue.block_pool import BlockPool
from segue.handoff import JOINT, HandoffTiming, PrefillState
from segue.handoff_messages import HandoffMessage, decode_message, encode_message
from segue.ids import AttemptRef, InstanceRef
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign, OutcomeKind, Peer
from worker_runtime import events as ev
from worker_runtime.toy_engine import SLOT_BYTES, ToyEngine

BLOCK = 4
TIMING = HandoffTiming(lease_us=1_000_000)
GATEWAY = "gateway:1"
CONDUCTOR = "conductor:1"
EFFECTS_MAX = 20_000
"""More than any test needs to come to rest."""


class Side:
    """One instance: its core, its engine, and effects that have not happened yet."""

    def __init__(self, uuid: str, incarnation: int, pages: int, *, prefill: bool, chunk: int, depth: int) -> None:
        self.ref = InstanceRef(uuid, incarnation)
        self.engine = ToyEngine(pages, BLOCK)
        self.pool = BlockPool(pages, BLOCK)
        limits = PlannerLimits(max_num_seqs=4, max_num_batched_tokens=chunk, max_model_len=256, pipeline_depth=depth)
        self.planner = BatchPlanner(self.pool, limits, ())
        self.core: PrefillCore | DecodeCore
        if prefill:
            self.core = PrefillCore(self.ref, self.planner, self.pool, TIMING, chunk)
        else:
            self.core = DecodeCore(self.ref, self.planner, self.pool, TIMING)
        self.plans = 0
        self.moves: list[ev.MovePages] = []
        self.cancelled: set[int] = set()

    @property
    def peer(self) -> Peer:
        return Peer(ref=self.ref, name=self.ref.uuid, control_address=f"mem://{self.ref.uuid}")


class Pair:
    def __init__(self, *, pages_p: int = 32, pages_d: int = 32, chunk: int = 8, depth: int = 0) -> None:
        self._pages = {"p": pages_p, "d": pages_d}
        self._chunk, self._depth = chunk, depth
        self.now_us = 1
        self.incarnation = 1
        self.p = self._boot("p")
        self.d = self._boot("d")
        self.network: list[HandoffMessage] = []
        self.tokens: dict[AttemptRef, dict[int, int]] = defaultdict(dict)
        self.finished: dict[AttemptRef, str] = {}
        self.outcomes: dict[AttemptRef, list[OutcomeKind]] = defaultdict(list)
        self.messages_sent: list[str] = []
        self.restart_asked = False

    def _boot(self, which: str) -> Side:
        return Side(
            which, self.incarnation, self._pages[which], prefill=which == "p", chunk=self._chunk, depth=self._depth
        )

    # -- what a test does

    def assign(self, request_id: str, prompt: list[int], *, max_tokens: int = 4, attempt: int = 1) -> Assign:
        sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True)
        return Assign(
            request_id=request_id,
            attempt=attempt,
            gateway=GATEWAY,
            token_ids=token_bytes(prompt),
            tokens_prompt=len(prompt),
            sampling=sampling,
            prefill=self.p.peer,
            decode=self.d.peer,
            hash_root=b"root",
        )

    def submit(self, assign: Assign, *, to_p: bool = True, to_d: bool = True) -> AttemptRef:
        if to_d:
            self.step(self.d, ev.Assigned(assign, CONDUCTOR))
        if to_p:
            self.step(self.p, ev.Assigned(assign, CONDUCTOR))
        return assign.key

    def cancel(self, side: Side, key: AttemptRef) -> None:
        self.step(side, ev.CancelRequested(key, "client gone"))

    def restart(self, which: str) -> None:
        """The process ends (with all its effects) and a new one takes its address; the survivor notices at once."""
        self.incarnation += 1
        old = self.p if which == "p" else self.d
        fresh = self._boot(which)
        if which == "p":
            self.p = fresh
            self.step(self.d, ev.PeerGone(old.ref))
        else:
            self.d = fresh
            self.step(self.p, ev.PeerGone(old.ref))

    def finish_plan(self, side: Side) -> bool:
        if side.plans == 0:
            return False
        side.plans -= 1
        self.step(side, ev.PlanFinished(side.engine.collect()))
        return True

    def finish_move(self, *, fail_after: int | None = None) -> bool:
        if not self.p.moves:
            return False
        move = self.p.moves.pop(0)
        pages = [] if move.op in self.p.cancelled else move.pages[:fail_after]
        alive = move.target == self.d.ref
        for source, target in pages if alive else ():
            self._write_page(source, target)
        moved = len(pages) if alive else 0
        self.step(self.p, ev.PagesMoved(move.op, moved, "" if moved == len(move.pages) else "failed"))
        return True

    def deliver(self, index: int = 0) -> bool:
        if not self.network:
            return False
        message = self.network.pop(index % len(self.network))
        side = self.p if message.target.uuid == "p" else self.d
        self.step(side, ev.PeerMessage(message))
        return True

    def wait(self, us: int) -> None:
        self.now_us += us
        self.step(self.p)
        self.step(self.d)

    def settle(self, leases: int = 8) -> None:
        """Let everything happen in order, and time pass, until both sides are idle or `leases` have passed."""
        until_us = self.now_us + leases * TIMING.lease_us
        effects = 0
        while self.now_us < until_us:
            busy = True
            while busy:
                busy = self.deliver() or self.finish_move() or self.finish_plan(self.p) or self.finish_plan(self.d)
                effects += busy
                assert effects < EFFECTS_MAX, "messages or plans go round in a circle"
            if not self.p.core.live() and not self.d.core.live():
                return
            self.wait(TIMING.repeat_us)

    def generated(self, key: AttemptRef) -> list[int]:
        return [token for _, token in sorted(self.tokens[key].items())]

    # -- carrying out decisions

    def step(self, side: Side, *events: ev.Event) -> None:
        for decision in side.core.step(self.now_us, list(events)):
            self._carry_out(side, decision)
        self.check()

    def _carry_out(self, side: Side, decision: ev.Decision) -> None:
        match decision:
            case ev.RunPlan(plan):
                side.engine.launch(plan)
                side.plans += 1
            case ev.MovePages():
                side.moves.append(decision)
            case ev.CancelMove(op):
                side.cancelled.add(op)
            case ev.SendPeer(message):
                decoded = decode_message(encode_message(message))
                assert decoded == message
                self.network.append(message)
                self.messages_sent.append(type(message).__name__)
            case ev.OpenLink(peer):
                ready = peer.ref == self.d.ref
                self.step(side, ev.LinkReady(peer.ref) if ready else ev.LinkRefused(peer.ref, "no answer"))
                if ready:
                    self.step(self.d, ev.LinkReady(side.ref))
            case ev.PushTokens(_, deltas):
                for delta in deltas:
                    self._receive_tokens(delta)
            case ev.Report(_, outcome):
                self.outcomes[AttemptRef(outcome.request_id, outcome.attempt)].append(outcome.kind)
            case ev.Fence(op, peer):
                self.step(side, ev.Fenced(op, peer, peer != self.p.ref))
            case ev.RestartNeeded():
                self.restart_asked = True
            case ev.LendPages() | ev.PublishKv():
                pass

    def _receive_tokens(self, delta: object) -> None:
        key = AttemptRef(delta.request_id, delta.attempt)  # type: ignore[attr-defined]
        for offset, token in enumerate(delta.token_ids):  # type: ignore[attr-defined]
            position = delta.position + offset  # type: ignore[attr-defined]
            assert self.tokens[key].setdefault(position, token) == token
        if delta.finish:  # type: ignore[attr-defined]
            assert key not in self.finished, "two terminal states"
            self.finished[key] = delta.finish  # type: ignore[attr-defined]

    def _write_page(self, source: int, target: int) -> None:
        assert isinstance(self.d.core, DecodeCore)
        reservations = [attempt.reservation for attempt in self.d.core._attempts.values()]
        lent = [page for reservation in reservations if reservation is not None for page in reservation.pages_new]
        assert target in lent, f"page {target} written, but it is not lent"
        size = BLOCK * SLOT_BYTES
        data = self.p.engine.buffer[source * size : (source + 1) * size]
        self.d.engine.buffer[target * size : (target + 1) * size] = data

    def check(self) -> None:
        self.p.core.check()
        self.d.core.check()
        prefill, decode = self.p.core.states(), self.d.core.states()
        for key, state in prefill.items():
            assert isinstance(state, PrefillState)
            there = self.p.core._attempts[key].peer == self.d.ref  # type: ignore[union-attr]
            if key in decode:
                assert decode[key] in JOINT[state], f"{key}: {state} with {decode[key]}"  # type: ignore[comparison-overlap]
            elif there and state in (PrefillState.COMPUTING, PrefillState.SENDING):
                raise AssertionError(f"{key}: {state}, but D has let go")
