import pytest

from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from segue.prefix_index import Applied, PrefixIndex

CHAIN = [bytes([n]) * 16 for n in range(8)]
P1 = InstanceRef("p1", 100)
P2 = InstanceRef("p2", 100)


def stored(*blocks: int, tier: str = "gpu") -> BlocksStored:
    return BlocksStored(b"", [CHAIN[n] for n in blocks], tier)


def batch(ref: InstanceRef, sequence: int, *events: KvEvent, snapshot: bool = False) -> KvEventBatch:
    return KvEventBatch(ref, sequence, list(events), snapshot)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    index.join(P1)
    index.join(P2)
    return index


def test_each_instance_gets_its_longest_prefix(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 1, 2, 3)))
    index.apply(batch(P2, 1, stored(0, 1)))
    assert index.match(CHAIN) == {"p1": 4, "p2": 2}


def test_a_hole_ends_the_prefix(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 2, 3)))
    index.apply(batch(P2, 1, stored(1, 2)))
    assert index.match(CHAIN) == {"p1": 1}


def test_tiers_add_up_unless_one_is_asked_for(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 1), stored(1, 2, tier="dram")))
    assert index.match(CHAIN) == {"p1": 3}
    assert index.match(CHAIN, ["gpu"]) == {"p1": 2}
    assert index.match(CHAIN, ["dram"]) == {}
    assert index.match(CHAIN, ["ssd"]) == {}


def test_a_removed_block_ends_the_prefix_in_its_tier_only(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 1, 2), stored(1, tier="dram")))
    index.apply(batch(P1, 2, BlocksRemoved([CHAIN[1]], "gpu")))
    assert index.match(CHAIN) == {"p1": 3}
    assert index.match(CHAIN, ["gpu"]) == {"p1": 1}


def test_a_gap_ends_belief_until_the_missing_messages_are_replayed(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0)))
    assert index.apply(batch(P1, 3, stored(2))) is Applied.GAP
    assert index.match(CHAIN) == {}
    assert index.sequence_applied("p1") == 1
    assert index.apply(batch(P1, 2, stored(1))) is Applied.APPLIED
    assert not index.is_believed("p1"), "message 3 is known to exist"
    assert index.apply(batch(P1, 3, stored(2))) is Applied.APPLIED
    assert index.match(CHAIN) == {"p1": 3}


def test_a_snapshot_replaces_everything_said_before_a_gap(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 1, 2)))
    index.apply(batch(P1, 9, stored(5)))
    assert index.apply(batch(P1, 10, BlocksCleared(), stored(0), snapshot=True)) is Applied.APPLIED
    assert index.match(CHAIN) == {"p1": 1}
    index.apply(batch(P1, 11, stored(1)))
    assert index.match(CHAIN) == {"p1": 2}


def test_a_member_first_heard_in_the_middle_is_not_believed(index: PrefixIndex) -> None:
    assert index.apply(batch(P1, 5, stored(0))) is Applied.GAP
    assert index.match(CHAIN) == {}
    assert index.sequence_applied("p1") == 0


def test_a_duplicate_changes_nothing(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0)))
    index.apply(batch(P1, 2, BlocksRemoved([CHAIN[0]])))
    assert index.apply(batch(P1, 1, stored(0))) is Applied.STALE
    assert index.match(CHAIN) == {}


def test_a_new_incarnation_voids_the_old_blocks(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0, 1)))
    again = InstanceRef("p1", 200)
    assert index.apply(batch(again, 1, stored(0))) is Applied.APPLIED
    assert index.match(CHAIN) == {"p1": 1}
    assert index.apply(batch(P1, 2, stored(1))) is Applied.STALE


def test_left_and_cleared_instances_are_not_matched(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0)))
    index.apply(batch(P2, 1, stored(0)))
    index.leave("p1")
    index.apply(batch(P2, 2, BlocksCleared()))
    assert index.match(CHAIN) == {}
    assert index.apply(batch(P1, 2, stored(0))) is Applied.UNKNOWN


def test_a_load_report_shows_a_gap_too(index: PrefixIndex) -> None:
    index.apply(batch(P1, 1, stored(0)))
    assert index.advance(P1, 3) is Applied.GAP
    assert index.match(CHAIN) == {}


def test_entries_of_retired_slots_are_swept_and_slots_used_again(index: PrefixIndex) -> None:
    index.apply(batch(P2, 1, stored(0)))
    for sequence in range(1, 40):
        index.apply(batch(P1, sequence, BlocksCleared(), stored(*range(8)), snapshot=True))
        index.sweep(3)
        index.check()
    index.leave("p1")
    for _ in range(20):
        index.sweep(100)
    index.check()
    assert index.entries() == 1
    assert index._slots_made < 20
