"""Which leading blocks of a prompt each instance has for its live attempts: a radix tree over their hash chains.

Chain hashes make it cheap: two chains that are equal at a block are equal before it, so how far a chain follows an edge
is found by halving, and a whole match takes as many halvings as there are forks on its way, however many attempts
share it. An edge counts its attempts by instance, so that a block that several of them share is one block there.

One tree has what is in use at each instance (pages of a shared prefix count once), another what is being computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from segue.ids import AttemptRef


class _Edge:
    """Blocks `start` to `end` of `chain`, behind those of its parents."""

    __slots__ = ("chain", "children", "counts", "end", "start")

    def __init__(self, chain: Sequence[bytes], start: int, end: int, counts: dict[str, int]) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.counts = counts
        self.children: dict[bytes, _Edge] = {}

    def split(self, place: int) -> None:
        """In two at block `place`; the other half becomes the only child."""
        rest = _Edge(self.chain, place, self.end, dict(self.counts))
        rest.children = self.children
        self.end = place
        self.children = {self.chain[place]: rest}

    def join_only_child(self) -> None:
        """Undo a split that nobody needs any more."""
        if len(self.children) != 1:
            return
        (child,) = self.children.values()
        if child.counts == self.counts:
            self.chain, self.end, self.children = child.chain, child.end, child.children


class LiveChains:
    """An attempt is at an instance once, with one chain."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Edge] = {}
        self._chains: dict[tuple[AttemptRef, str], Sequence[bytes]] = {}
        self._blocks: Counter[str] = Counter()
        self._shared: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, key: AttemptRef, uuid: str, hashes: Sequence[bytes]) -> int:
        """The attempt has these blocks at `uuid` from now on; how many of them nobody else has there."""
        assert (key, uuid) not in self._chains, "an attempt has its blocks once"
        self._chains[key, uuid] = hashes
        siblings, place, new = self._roots, 0, 0
        while place < len(hashes):
            edge = siblings.get(hashes[place])
            if edge is None:
                edge = siblings[hashes[place]] = _Edge(hashes, place, len(hashes), {})
            common = common_end(edge.chain, hashes, place, min(edge.end, len(hashes)))
            if common < edge.end:
                edge.split(common)
            new += self._count(edge, uuid, 1)
            siblings, place = edge.children, common
        return new

    def drop(self, key: AttemptRef, uuid: str) -> int:
        """It has them no more; how many blocks nobody has there now. 0 where it had none (any more)."""
        hashes = self._chains.pop((key, uuid), ())
        way: list[tuple[dict[bytes, _Edge], _Edge]] = []
        siblings, place, freed = self._roots, 0, 0
        while place < len(hashes):
            edge = siblings[hashes[place]]
            freed += self._count(edge, uuid, -1)
            way.append((siblings, edge))
            siblings, place = edge.children, edge.end
        for siblings, edge in reversed(way):
            if edge.counts:
                edge.join_only_child()
            else:
                del siblings[edge.chain[edge.start]]
        return freed

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each instance has; absent for none."""
        matched: dict[str, int] = {}
        siblings, place = self._roots, 0
        while place < len(hashes):
            edge = siblings.get(hashes[place])
            if edge is None:
                break
            place = common_end(edge.chain, hashes, place, min(edge.end, len(hashes)))
            for uuid in edge.counts:
                matched[uuid] = place
            if place < edge.end:
                break
            siblings = edge.children
        return matched

    def blocks(self, uuid: str) -> int:
        """Different blocks at `uuid`."""
        return self._blocks[uuid]

    def blocks_shared(self, uuid: str) -> int:
        """Those that more than one attempt uses there."""
        return self._shared[uuid]

    def check(self) -> None:
        blocks: Counter[str] = Counter()
        edges = [*self._roots.values()]
        while edges:
            edge = edges.pop()
            assert edge.counts and edge.start < edge.end, "an edge of nobody, or of nothing"
            assert all(count > 0 for count in edge.counts.values()), "an edge counts somebody who has left"
            for uuid in edge.counts:
                blocks[uuid] += edge.end - edge.start
            edges += edge.children.values()
        assert blocks == self._blocks, "blocks by instance and edges disagree"

    def _count(self, edge: _Edge, uuid: str, change: int) -> int:
        """Blocks that came into use, or went out of it, by one attempt more or less."""
        before = edge.counts.get(uuid, 0)
        after, size = before + change, edge.end - edge.start
        edge.counts[uuid] = after
        if min(before, after) == 1:
            self._shared[uuid] += change * size
        if not after:
            del edge.counts[uuid]
        if min(before, after):
            return 0
        self._blocks[uuid] += change * size
        if not self._blocks[uuid]:
            del self._blocks[uuid], self._shared[uuid]
        return size


def common_end(left: Sequence[bytes], right: Sequence[bytes], start: int, end: int) -> int:
    """Where two chains that are equal at block `start` part, at most `end`."""
    if left[end - 1] == right[end - 1]:
        return end
    low, high = start + 1, end - 1
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
