"""How long answers get: survival of a sequence by the number of tokens it has, learned from those that ended.

    ends share of a bucket = (ends in it + prior) / (answers that reached it + PRIOR_ANSWERS)
    hazard                 = -log(1 - ends share) / width, per token
    survival(a -> a + n)   = exp(-sum of hazard * tokens over a .. a + n)

Buckets of output length are four to an octave (an actuarial life table). An answer that was cut off, by its limit or a
cancel, reaches buckets without ending in one (Kaplan and Meier 1958): it says that answers get at least so long. Counts
are halved every `WINDOW` answers, so that the past fades; memory is the buckets.
"""

from __future__ import annotations

import math
from bisect import bisect_right

WINDOW = 512
"""Answers after which older ones count half."""

PRIOR_ANSWERS = 1.0
PRIOR_MEAN_TOKENS = 256
"""Before anything is known: as if one answer had reached each bucket, of a kind that has 256 tokens on average."""

LONGEST = 1 << 20

SHARE_MAX = 1.0 - 1e-9
"""A hazard has to be finite."""


def _edges() -> list[int]:
    """0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: where buckets begin."""
    edges, start = [0, 1, 2, 3], 4
    while start < LONGEST:
        edges += [start + quarter * start // 4 for quarter in range(4)]
        start *= 2
    return edges


EDGES = _edges()


def _width(bucket: int) -> int:
    """The last bucket has no end; as wide as the one before it."""
    return EDGES[bucket + 1] - EDGES[bucket] if bucket + 1 < len(EDGES) else EDGES[bucket] - EDGES[bucket - 1]


class OutputLengths:
    """Distribution of the tokens that one model's answers have. Pure; a query costs a search among 77 buckets."""

    def __init__(self) -> None:
        self._ends = [0.0] * len(EDGES)
        self._reached = [0.0] * len(EDGES)
        self._learned = 0
        self._hazards: list[float] = []
        self._cumulative: list[float] = []
        self._settle()

    @property
    def learned(self) -> int:
        """Answers seen, those cut off included."""
        return self._learned

    def learn(self, tokens: int, *, cut_off: bool = False) -> None:
        """One answer of `tokens` generated tokens; `cut_off`: it would have gone on."""
        if tokens <= 0:
            return
        last = bisect_right(EDGES, min(tokens, LONGEST) - 1) - 1
        for bucket in range(last):
            self._reached[bucket] += 1.0
        if cut_off:
            self._reached[last] += (tokens - EDGES[last]) / _width(last)
        else:
            self._reached[last] += 1.0
            self._ends[last] += 1.0
        self._learned += 1
        if self._learned % WINDOW == 0:
            self._ends = [count / 2 for count in self._ends]
            self._reached = [count / 2 for count in self._reached]
        self._hazards = []

    def survival(self, produced: float, more: float) -> float:
        """Probability that an answer which has `produced` tokens gets `more` on top."""
        return math.exp(self._hazard_until(produced) - self._hazard_until(produced + more))

    def remaining_quantile(self, produced: float, quantile: float, tokens_left: int) -> int:
        """Tokens still to come that `quantile` of such answers stay within; at most `tokens_left`."""
        target = self._hazard_until(produced) - math.log(1.0 - quantile)
        bucket = bisect_right(self._cumulative, target) - 1
        end = EDGES[bucket] + (target - self._cumulative[bucket]) / self._hazards[bucket]
        return max(0, min(math.ceil(end - produced), tokens_left))

    def remaining_mean(self, produced: float, tokens_left: int) -> float:
        """Expected tokens still to come, with `tokens_left` as the limit: the integral of survival."""
        done = self._hazard_until(produced)
        mean, at, limit = 0.0, produced, produced + tokens_left
        while at < limit:
            bucket = bisect_right(EDGES, at) - 1
            until = min(limit, EDGES[bucket + 1] if bucket + 1 < len(EDGES) else math.inf)
            alive = math.exp(done - self._hazard_until(at))
            hazard = self._hazards[bucket]
            mean += alive * -math.expm1(-hazard * (until - at)) / hazard
            if alive < 1e-6:
                break
            at = until
        return mean

    def _hazard_until(self, tokens: float) -> float:
        if not self._hazards:
            self._settle()
        bucket = bisect_right(EDGES, tokens) - 1
        return self._cumulative[bucket] + (tokens - EDGES[bucket]) * self._hazards[bucket]

    def _settle(self) -> None:
        self._hazards, self._cumulative, total = [], [], 0.0
        for bucket, (ends, reached) in enumerate(zip(self._ends, self._reached, strict=True)):
            width = _width(bucket)
            prior = -math.expm1(-width / PRIOR_MEAN_TOKENS) * PRIOR_ANSWERS
            share = min((ends + prior) / (reached + PRIOR_ANSWERS), SHARE_MAX)
            self._cumulative.append(total)
            self._hazards.append(-math.log1p(-share) / width)
            total -= math.log1p(-share)
