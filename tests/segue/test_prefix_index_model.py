"""PrefixIndex against a model that keeps one set per (instance, tier) and forgets nothing it should not."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from segue.prefix_index import PrefixIndex

UUIDS = ("a", "b", "c")
TIERS = ("gpu", "dram")
CHAIN = [bytes([n]) * 16 for n in range(6)]

events = st.lists(
    st.one_of(
        st.builds(BlocksStored, st.just(b""), st.lists(st.sampled_from(CHAIN), max_size=6), st.sampled_from(TIERS)),
        st.builds(BlocksRemoved, st.lists(st.sampled_from(CHAIN), max_size=4), st.sampled_from(TIERS)),
        st.just(BlocksCleared()),
    ),
    max_size=4,
)


class ModelInstance:
    def __init__(self) -> None:
        self.incarnation, self.applied, self.seen = 1, 0, 0
        self.held: set[tuple[bytes, str]] = set()

    def take(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self.held |= {(block, event.tier) for block in event.hashes}
        elif isinstance(event, BlocksRemoved):
            self.held -= {(block, event.tier) for block in event.hashes}
        else:
            self.held.clear()


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, ModelInstance] = {}

    @rule(uuid=st.sampled_from(UUIDS))
    def join(self, uuid: str) -> None:
        if uuid not in self.model:
            self.model[uuid] = ModelInstance()
        self.index.join(InstanceRef(uuid, self.model[uuid].incarnation))

    @rule(uuid=st.sampled_from(UUIDS))
    def leave(self, uuid: str) -> None:
        self.index.leave(uuid)
        self.model.pop(uuid, None)

    @rule(
        uuid=st.sampled_from(UUIDS),
        ahead=st.integers(-2, 2),
        restarts=st.integers(-1, 1),
        snapshot=st.booleans(),
        events=events,
    )
    def publish(self, uuid: str, ahead: int, restarts: int, snapshot: bool, events: list[KvEvent]) -> None:
        known = self.model.get(uuid)
        incarnation = (known.incarnation if known else 1) + (restarts if ahead == 2 else 0)
        sequence = max(1, (known.applied if known else 0) + 1 + ahead)
        self.index.apply(KvEventBatch(InstanceRef(uuid, incarnation), sequence, events, snapshot))
        if known is None or incarnation < known.incarnation:
            return
        if incarnation > known.incarnation:
            known = self.model[uuid] = ModelInstance()
            known.incarnation = incarnation
        known.seen = max(known.seen, sequence)
        if sequence == known.applied + 1 or (snapshot and sequence > known.applied):
            known.applied = sequence
            for event in ([BlocksCleared()] if snapshot else []) + events:
                known.take(event)

    @rule(entries=st.integers(0, 5))
    def sweep(self, entries: int) -> None:
        self.index.sweep(entries)

    @invariant()
    def longest_prefixes_agree(self) -> None:
        for tiers in (TIERS, ("gpu",)):
            expected = {}
            for uuid, known in self.model.items():
                held = [any((block, tier) in known.held for tier in tiers) for block in CHAIN]
                depth = held.index(False) if False in held else len(CHAIN)
                if depth and 0 < known.applied == known.seen:
                    expected[uuid] = depth
            assert self.index.match(CHAIN, tiers) == expected

    @invariant()
    def counts_agree(self) -> None:
        self.index.check()
        assert all(self.index.blocks(uuid) == len(known.held) for uuid, known in self.model.items())


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
