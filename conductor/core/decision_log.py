"""Why each request went where it went, for `segue explain`: a bounded ring of decisions, and how right they were.

An entry is opened when an attempt is placed or rejected, and completed by what its outcomes reveal. Regret is actual
less predicted time: positive when it took longer than predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice

import msgspec

from conductor.core.latency import Actual, Terms
from segue.ids import AttemptRef

DECISIONS_KEPT = 2_048
"""Some 2 KB each: minutes of a busy cluster."""

CANDIDATES_KEPT = 8

REGRET_EDGES_US = (-10e6, -1e6, -100e3, -10e3, -1e3, 0.0, 1e3, 10e3, 100e3, 1e6, 10e6)
"""Upper bounds of the classes that regrets are counted in; what is above has the last class."""


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, as it was ranked."""

    prefill: str
    """Instance name; empty: the decode instance prefills."""
    decode: str
    source: str
    """Where the prefix comes from, beyond what the computing instance holds; empty: nowhere."""
    cost: float
    """Of the routing policy, in its own unit; the least is tried first."""
    tokens_compute: int
    tokens_cached: int
    terms: Terms | None
    """None while nothing is known of the model's costs."""
    verdict: str
    """`chosen`, the objective that it would miss, or empty when it was not needed."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    key: AttemptRef
    model: str
    tenant: str
    priority: int
    tokens_known: int
    decided_us: int
    waited_us: int
    decision: str
    """`routed`, `rejected`."""
    reason: str
    candidates: tuple[Considered, ...]
    candidates_total: int
    actual: Actual = Actual()
    prefill_let_go: bool = False
    """The decode instance had all but one block of the prompt, and computed the rest itself."""
    ended: str = ""
    """Why it is over: the gateway's reason to finish, or what failed. Empty while it runs."""

    @property
    def chosen(self) -> Considered | None:
        return next((each for each in self.candidates if each.verdict == "chosen"), None)


class RegretTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Actual less predicted, of all finished predictions of one kind: their sum, and how many fell into each class."""

    sum_us: float = 0.0
    counts: tuple[int, ...] = (0,) * (len(REGRET_EDGES_US) + 1)

    def with_one(self, us: float) -> RegretTotals:
        counts = list(self.counts)
        counts[bisect_left(REGRET_EDGES_US, us)] += 1
        return RegretTotals(sum_us=self.sum_us + us, counts=tuple(counts))


class DecisionLog:
    def __init__(self) -> None:
        self._kept: OrderedDict[AttemptRef, Explanation] = OrderedDict()
        self._regrets: dict[tuple[str, str], RegretTotals] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, explanation: Explanation) -> None:
        self._kept[explanation.key] = explanation
        self._kept.move_to_end(explanation.key)
        if len(self._kept) > DECISIONS_KEPT:
            self._kept.popitem(last=False)

    def complete(self, key: AttemptRef, actual: Actual) -> None:
        """Add what became known of the attempt; without effect when it is not kept (any more)."""
        entry = self._kept.get(key)
        if entry is None:
            return
        known = entry.actual
        merged = Actual(
            ttft_us=known.ttft_us or actual.ttft_us,
            tpot_us=known.tpot_us or actual.tpot_us,
            tokens_generated=max(known.tokens_generated, actual.tokens_generated),
        )
        self._kept[key] = msgspec.structs.replace(entry, actual=merged)
        terms = None if entry.chosen is None else entry.chosen.terms
        if terms is not None:
            self._regret(entry.model, "ttft", 0 if known.ttft_us else actual.ttft_us, terms.ttft_us)
            self._regret(entry.model, "tpot", 0 if known.tpot_us else actual.tpot_us, terms.tpot_us)

    def let_go(self, key: AttemptRef) -> None:
        self._change(key, prefill_let_go=True)

    def ended(self, key: AttemptRef, reason: str) -> None:
        """The first reason stays."""
        entry = self._kept.get(key)
        if entry is not None and not entry.ended:
            self._change(key, ended=reason)

    def recent(self, count: int) -> list[Explanation]:
        """The latest decisions, the newest first."""
        return list(islice(reversed(self._kept.values()), count))

    def _change(self, key: AttemptRef, **changes: object) -> None:
        entry = self._kept.get(key)
        if entry is not None:
            self._kept[key] = msgspec.structs.replace(entry, **changes)

    def find(self, request_id: str) -> list[Explanation]:
        """Every kept attempt of a request, the oldest first. What gateways append to its id, a number for each of
        several choices (`id-2`) and a suffix of their own (`id~...`), may be left out."""
        return [entry for key, entry in self._kept.items() if _names(key.request_id, request_id)]

    def regrets(self, model: str, kind: str) -> RegretTotals:
        """Since the start; `kind` is ttft or tpot."""
        return self._regrets.get((model, kind), RegretTotals())

    def _regret(self, model: str, kind: str, actual_us: float, predicted_us: float) -> None:
        if actual_us > 0:
            totals = self._regrets.get((model, kind), RegretTotals())
            self._regrets[model, kind] = totals.with_one(actual_us - predicted_us)


def _names(own: str, asked: str) -> bool:
    if own == asked:
        return True
    given = own.rpartition("~")[0] or own
    rest = given.removeprefix(asked)
    return given == asked or (rest != given and rest[:1] == "-" and rest[1:].isdigit())
