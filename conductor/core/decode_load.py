"""What a decode instance will hold when a request lands there: its batch and K/V, forecast from what runs, what is on
its way, and how long answers get.

    batch(t) = 1 per attempt on its way + sum over running rows of survival(produced -> produced + steps until t)

Rows are kept in cohorts of those that began within COHORT_STEPS steps of each other, so that a forecast costs as many
operations as there are cohorts, not rows. Progress is counted by a clock of predicted steps: the core sees no token.
"""

from __future__ import annotations

import msgspec

from segue.ids import AttemptRef
from segue.output_lengths import OutputLengths

COHORT_STEPS = 32


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """State of a decode instance at some time, without the request that asks."""

    batch: float
    kv_tokens: float


class _Row(msgspec.Struct, frozen=True, array_like=True):
    cohort: int
    tokens_prompt: int
    limit: int


class _Cohort:
    __slots__ = ("count", "limits", "prompts")

    def __init__(self) -> None:
        self.count = 0
        self.prompts = 0
        self.limits = 0


class DecodeLoad:
    """`slowness` is the recent mean of reported over predicted step times."""

    def __init__(self) -> None:
        self.slowness = 1.0
        self.others_rows = 0
        self.others_tokens = 0
        """Rows and K/V tokens that a load report shows beyond ours: other Conductors' work."""
        self.reported = Landing(0.0, 0.0)
        """As of the last load report, others' work included."""
        self._coming: dict[AttemptRef, int] = {}
        self._coming_tokens = 0
        self._rows: dict[AttemptRef, _Row] = {}
        self._cohorts: dict[int, _Cohort] = {}
        self._prompts_running = 0
        self._starts_running = 0.0
        """Sums over rows, so that the present needs no loop: prompt tokens, and the clock at each first token."""
        self._steps = 0.0
        self._at_us = 0

    @property
    def rows(self) -> int:
        """Running, by our own book."""
        return len(self._rows)

    def advance(self, now_us: int, step_us: float) -> None:
        """The clock of steps goes on, at the present speed."""
        if self._rows and step_us > 0.0:
            self._steps += max(0, now_us - self._at_us) / step_us
        self._at_us = now_us

    def book(self, key: AttemptRef, tokens: int) -> None:
        """An attempt of `tokens` tokens is on its way."""
        self._coming[key] = tokens
        self._coming_tokens += tokens

    def land(self, key: AttemptRef, tokens_prompt: int, generated: int, limit: int) -> None:
        """It runs from now on; `generated` counts its earlier tokens, `limit` bounds all of them."""
        tokens = self._coming.pop(key, None)
        if tokens is None:
            return
        self._coming_tokens -= tokens
        cohort = int((self._steps - generated) // COHORT_STEPS)
        self._rows[key] = _Row(cohort, tokens_prompt, limit)
        entry = self._cohorts.setdefault(cohort, _Cohort())
        entry.count += 1
        entry.prompts += tokens_prompt
        entry.limits += limit
        self._prompts_running += tokens_prompt
        self._starts_running += (cohort + 0.5) * COHORT_STEPS

    def remove(self, key: AttemptRef) -> None:
        """It has ended, wherever it stood."""
        self._coming_tokens -= self._coming.pop(key, 0)
        row = self._rows.pop(key, None)
        if row is None:
            return
        entry = self._cohorts[row.cohort]
        entry.count -= 1
        entry.prompts -= row.tokens_prompt
        entry.limits -= row.limit
        self._prompts_running -= row.tokens_prompt
        self._starts_running -= (row.cohort + 0.5) * COHORT_STEPS
        if not entry.count:
            del self._cohorts[row.cohort]

    def running(self) -> Landing:
        """What runs at this moment."""
        kv_tokens = float(self._prompts_running + self.others_tokens)
        kv_tokens += max(0.0, len(self._rows) * self._steps - self._starts_running)
        return Landing(len(self._rows) + self.others_rows, kv_tokens)

    def ahead(self, steps: float, lengths: OutputLengths) -> Landing:
        """After so many more steps. What is on its way is taken as landed, and as running still."""
        batch = float(len(self._coming) + self.others_rows)
        kv_tokens = float(self._coming_tokens + self.others_tokens)
        for cohort, entry in self._cohorts.items():
            produced = max(0.0, self._steps - (cohort + 0.5) * COHORT_STEPS)
            if produced + steps >= entry.limits / entry.count + COHORT_STEPS / 2:
                continue
            alive = lengths.survival(produced, steps) if steps > 0.0 else 1.0
            batch += alive * entry.count
            kv_tokens += alive * (entry.prompts + entry.count * (produced + steps))
        return Landing(batch, kv_tokens)

    def check(self) -> None:
        assert sum(entry.count for entry in self._cohorts.values()) == len(self._rows), "a row in no cohort"
        assert self._coming_tokens == sum(self._coming.values()), "tokens of attempts that are not coming"
