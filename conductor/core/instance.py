"""What the core knows of one instance: its manifest, its last load report, and what is booked on it.

Load is *booked + others*. Booked is exact and counts from the decision, so a burst spreads before any report arrives.
Others is what a report shows beyond the bookings at that moment: other Conductors' work, or work not yet cleaned up.
The booked prompts are kept in predicted time as well, so that a queue can be read off at any moment (`prefill_work`).
"""

from __future__ import annotations

import math

import msgspec

from conductor.core.prefill_queue import PrefillQueue
from conductor.core.rendezvous import stable_hash
from segue.kv_events import LoadReport
from segue.manifest import InstanceManifest

REFUSAL_HOLD_US = 100_000
"""First pause after a refusal; each further one in a row doubles it. Usually the next load report ends the matter."""

REFUSAL_HOLD_US_MAX = 3_200_000

RAMP_US = 30_000_000
RAMP_SUCCESSES = 8
"""A fresh instance counts as warm after this many successes, or after RAMP_US."""

RAMP_TOKENS = 512
"""Extra cost of each further request on a fresh instance: compilation, cold caches, nothing proven yet."""


PREFILL_SHARE_US = 10_000_000
"""Memory of how much of a decode instance's time prefills take: about the life of a request there."""

PREFILL_SHARE_MAX = 0.9


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one attempt books on one instance: prompt tokens to compute, KV pages beyond the full blocks of its prompt,
    and one row."""

    tokens: int
    pages: int
    pages_fresh: int = 0
    """Of all its pages those that are not in the cache: they are taken from the free ones, or push others out."""
    compute_us: float = 0.0
    """Predicted time of computing `tokens`."""
    kv_tokens: int = 0
    """K/V that its decode steps read; 0 where it does not decode."""


class Instance:
    """One incarnation. Bookings change through `Ledger` only."""

    def __init__(self, manifest: InstanceManifest, now_us: int) -> None:
        self.manifest = manifest
        self.ref = manifest.ref
        self.uuid = manifest.ref.uuid
        self.stable_hash = stable_hash(self.uuid.encode())
        self.block_size = manifest.layout.block_size
        pool_tokens = manifest.pages_total * self.block_size
        self.tokens_capacity = min(pool_tokens, manifest.max_model_len or pool_tokens)
        """Longest sequence it can ever hold."""
        self.joined_us = now_us
        self.draining = False
        self.load: LoadReport | None = None
        self.booked_tokens = 0
        self.booked_pages = 0
        self.booked_rows = 0
        self.booked_kv_tokens = 0
        self.prefill_work = PrefillQueue()
        """Booked prompts that are not computed yet."""
        self.pages_free = manifest.pages_total
        """Pages that hold nothing: as last reported, less what was booked since."""
        self.pages_shared = 0
        """Booked pages that more than one attempt uses."""
        self.pages_taken = 0
        self.rows_taken = 0
        """All that was ever booked: how fast they grow is the demand."""
        self._prefill_us = 0.0
        self._prefill_at_us = now_us
        self.others_tokens = 0
        self.others_pages = 0
        self.others_rows = 0
        self.others_kv_tokens = 0
        self.successes = 0
        self._refusals = 0
        self.refused_until_us = 0

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def tokens_queued(self) -> int:
        return self.booked_tokens + self.others_tokens

    @property
    def pages_used(self) -> int:
        return self.booked_pages + self.others_pages

    @property
    def rows_used(self) -> int:
        return self.booked_rows + self.others_rows

    @property
    def kv_tokens_used(self) -> int:
        return self.booked_kv_tokens + self.others_kv_tokens

    def prefill_share(self, now_us: int) -> float:
        """Share of its time that prefills take of late."""
        if not self._prefill_us:
            return 0.0
        faded_us = self._prefill_us * math.exp((self._prefill_at_us - now_us) / PREFILL_SHARE_US)
        return min(faded_us / PREFILL_SHARE_US, PREFILL_SHARE_MAX)

    def note_prefill(self, now_us: int, compute_us: float) -> None:
        """A prompt will be computed here."""
        self._prefill_us *= math.exp((self._prefill_at_us - now_us) / PREFILL_SHARE_US)
        self._prefill_us += compute_us
        self._prefill_at_us = now_us

    def has_room(self, pages: int) -> bool:
        manifest = self.manifest
        return self.rows_used < manifest.max_num_seqs and self.pages_used + pages <= manifest.pages_total

    def take_report(self, report: LoadReport) -> None:
        if self.load is not None and report.sequence <= self.load.sequence:
            return
        self.load = report
        in_use = report.pages_active + report.pages_held + report.pages_quarantined
        self.others_tokens = max(0, report.tokens_queued - self.booked_tokens)
        self.others_pages = max(0, in_use - self.booked_pages)
        self.others_rows = max(0, report.running + report.waiting - self.booked_rows)
        self.others_kv_tokens = max(0, report.tokens_running - self.booked_kv_tokens)
        self.pages_free = report.pages_free

    def refuse(self, now_us: int) -> None:
        """It had no room although we thought so: leave it alone for a moment. No sign of illness."""
        self.refused_until_us = now_us + min(REFUSAL_HOLD_US << self._refusals, REFUSAL_HOLD_US_MAX)
        self._refusals = min(self._refusals + 1, 16)

    def set_aside(self, until_us: int) -> None:
        """Nothing is to be assigned to it before; 0: it takes work again."""
        self.refused_until_us = until_us

    def grant(self) -> None:
        self._refusals = 0

    def succeed(self) -> None:
        self.successes += 1

    def is_warm(self, now_us: int) -> bool:
        return self.successes >= RAMP_SUCCESSES or now_us - self.joined_us >= RAMP_US

    def ramp_tokens(self, now_us: int) -> float:
        """Cost that keeps a burst off a fresh instance; nothing for its first request."""
        if self.is_warm(now_us):
            return 0.0
        return self.booked_rows * RAMP_TOKENS * (1.0 - self.successes / RAMP_SUCCESSES)
