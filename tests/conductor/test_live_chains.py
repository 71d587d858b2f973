"""Blocks of live attempts by instance, against sets of blocks."""

from __future__ import annotations

from collections import Counter

from conductor_world import chain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core.live_chains import LiveChains, common_end
from segue.ids import AttemptRef

WORDS = st.lists(st.sampled_from("abc"), max_size=6)
"""Chains that fork often: a block names all that come before it, as a chain hash does."""

PLACES = st.sampled_from(["i1", "i2", "i3"])


def chain_of(word: list[str]) -> list[bytes]:
    return ["".join(word[: end + 1]).encode() for end in range(len(word))]


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_where_two_chains_part_is_found(shared: int, left: int, right: int) -> None:
    head = chain("s", shared)
    ours, theirs = [*head, *chain("l", left)], [*head, *chain("r", right)]
    assert common_end(ours, theirs, 0, min(len(ours), len(theirs))) == shared


def test_a_block_that_attempts_share_counts_once_until_the_last_has_gone() -> None:
    chains = LiveChains()
    first, second = AttemptRef("r1", 1), AttemptRef("r2", 1)
    assert chains.add(first, "i1", chain_of(["a", "b", "c"])) == 3
    assert chains.add(second, "i1", chain_of(["a", "b", "a", "a"])) == 2
    assert (chains.blocks("i1"), chains.blocks_shared("i1")) == (5, 2)
    assert chains.drop(first, "i1") == 1
    assert chains.drop(second, "i1") == 4
    assert chains.match(chain_of(["a", "b"])) == {}


class Against(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.chains = LiveChains()
        self.live: dict[tuple[AttemptRef, str], list[bytes]] = {}
        self.count = 0

    def _uses(self, uuid: str) -> Counter[bytes]:
        return Counter(block for (_, place), blocks in self.live.items() if place == uuid for block in blocks)

    @rule(word=WORDS, uuid=PLACES)
    def add(self, word: list[str], uuid: str) -> None:
        self.count += 1
        key, blocks = AttemptRef(f"r{self.count}", 1), chain_of(word)
        new = len(set(blocks) - set(self._uses(uuid)))
        assert self.chains.add(key, uuid, blocks) == new
        self.live[key, uuid] = blocks

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if not self.live:
            return
        key, uuid = data.draw(st.sampled_from(sorted(self.live)))
        before = set(self._uses(uuid))
        del self.live[key, uuid]
        assert self.chains.drop(key, uuid) == len(before - set(self._uses(uuid)))
        assert self.chains.drop(key, uuid) == 0

    @rule(word=WORDS)
    def match(self, word: list[str]) -> None:
        blocks, expected = chain_of(word), {}
        for uuid in ("i1", "i2", "i3"):
            depth = sum(block in self._uses(uuid) for block in blocks)
            if depth:
                expected[uuid] = depth
        assert self.chains.match(blocks) == expected

    @invariant()
    def agrees(self) -> None:
        self.chains.check()
        for uuid in ("i1", "i2", "i3"):
            uses = self._uses(uuid)
            assert self.chains.blocks(uuid) == len(uses)
            assert self.chains.blocks_shared(uuid) == sum(count > 1 for count in uses.values())


TestAgainstSets = Against.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
