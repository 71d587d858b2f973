"""How much an instance, or a pair of them, has failed lately. Back-pressure is not failure and is not recorded here."""

from __future__ import annotations

HALF_LIFE_US = 30_000_000
"""A failing instance is tried again after some minutes, and a repaired one is trusted again."""

PENALTY_TOKENS = 1024
"""Cost of the first recent failure; each further one doubles it, so that after a handful an instance that fails at once
(and is therefore always the least loaded) loses against any queue of the others."""

SCORE_MAX = 12.0


class Health:
    """An exponentially decaying count of failures; a success halves it."""

    __slots__ = ("_at_us", "_score")

    def __init__(self) -> None:
        self._score = 0.0
        self._at_us = 0

    def fail(self, now_us: int) -> None:
        self._settle(now_us)
        self._score = min(self._score + 1.0, SCORE_MAX)

    def succeed(self, now_us: int) -> None:
        self._settle(now_us)
        self._score *= 0.5

    def score(self, now_us: int) -> float:
        if not self._score:
            return 0.0
        return float(self._score * 0.5 ** ((now_us - self._at_us) / HALF_LIFE_US))

    def penalty_tokens(self, now_us: int) -> float:
        if not self._score:
            return 0.0
        return float(PENALTY_TOKENS * (2.0 ** self.score(now_us) - 1.0))

    def _settle(self, now_us: int) -> None:
        self._score = self.score(now_us)
        self._at_us = now_us


class HealthBook:
    """Health by key: (uuid,) for an instance slot, (uuid, uuid) for a pair. It outlives incarnations, so that a slot
    whose process dies again and again does not come back spotless. Settled entries are dropped."""

    KEYS_MAX = 4096
    """Only what failed recently has an entry; past this the quietest are dropped."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, ...], Health] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def fail(self, now_us: int, *uuids: str) -> None:
        if len(self._entries) >= self.KEYS_MAX:
            self._drop_quiet(now_us)
        self._entries.setdefault(uuids, Health()).fail(now_us)

    def succeed(self, now_us: int, *uuids: str) -> None:
        entry = self._entries.get(uuids)
        if entry is not None:
            entry.succeed(now_us)
            if entry.score(now_us) < 0.01:
                del self._entries[uuids]

    def penalty_tokens(self, now_us: int, *uuids: str) -> float:
        entry = self._entries.get(uuids) if self._entries else None
        return 0.0 if entry is None else entry.penalty_tokens(now_us)

    def _drop_quiet(self, now_us: int) -> None:
        ranked = sorted(self._entries, key=lambda key: (self._entries[key].score(now_us), key))
        for key in ranked[: len(ranked) // 2]:
            del self._entries[key]
