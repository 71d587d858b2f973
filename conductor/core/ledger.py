"""Booked capacity, attempt by attempt. Every booking ends exactly once; `check` proves that the sums agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conductor.core.instance import Instance, Share
from conductor.core.live_chains import LiveChains
from segue.ids import AttemptRef, InstanceRef


class Ledger:
    """(attempt, instance) -> Share. Instances are handed in, because a lost one is gone with all that it had booked."""

    def __init__(self) -> None:
        self._shares: dict[tuple[AttemptRef, InstanceRef], Share] = {}
        self.in_use = LiveChains()
        """Full blocks of the booked attempts: one page each at an instance, whoever shares it."""

    def reserve(
        self, key: AttemptRef, instance: Instance, share: Share, now_us: int, hashes: Sequence[bytes] = ()
    ) -> None:
        """`share.pages` are its own; those of the blocks `hashes` are shared with whoever has them in use."""
        assert (key, instance.ref) not in self._shares, "an attempt books an instance once"
        self._shares[key, instance.ref] = share
        pages = share.pages + self.in_use.add(key, instance.uuid, hashes)
        instance.booked_tokens += share.tokens
        instance.booked_pages += pages
        instance.booked_kv_tokens += share.kv_tokens
        instance.booked_rows += 1
        instance.pages_taken += pages
        instance.pages_shared = self.in_use.blocks_shared(instance.uuid)
        instance.rows_taken += 1
        instance.pages_free = max(0, instance.pages_free - share.pages_fresh)
        if share.compute_us:
            instance.prefill_work.add(key, share.compute_us, now_us)
            instance.note_prefill(now_us, share.compute_us)

    def release_tokens(self, key: AttemptRef, instance: Instance, now_us: int) -> None:
        """The prompt is computed; pages and row stay booked. No change when nothing is booked."""
        share = self._shares.get((key, instance.ref))
        if share is not None:
            self._shares[key, instance.ref] = Share(0, share.pages, kv_tokens=share.kv_tokens)
            instance.booked_tokens -= share.tokens
            instance.prefill_work.done(key, now_us)

    def release(self, key: AttemptRef, instance: Instance) -> bool:
        """End the booking; False when there is none (any more)."""
        share = self._shares.pop((key, instance.ref), None)
        if share is None:
            return False
        instance.booked_tokens -= share.tokens
        instance.booked_pages -= share.pages + self.in_use.drop(key, instance.uuid)
        instance.pages_shared = self.in_use.blocks_shared(instance.uuid)
        instance.booked_kv_tokens -= share.kv_tokens
        instance.booked_rows -= 1
        instance.prefill_work.drop(key)
        return True

    def drop(self, key: AttemptRef, ref: InstanceRef) -> None:
        """Forget a booking on an instance that is gone."""
        if self._shares.pop((key, ref), None) is not None:
            self.in_use.drop(key, ref.uuid)

    def keys(self) -> list[tuple[AttemptRef, InstanceRef]]:
        return list(self._shares)

    def check(self, instances: Mapping[str, Instance]) -> None:
        self.in_use.check()
        sums = {instance.ref: [0, 0, 0, 0] for instance in instances.values()}
        for (_, ref), share in self._shares.items():
            assert ref in sums, "a booking on an instance that is gone"
            for position, amount in enumerate((share.tokens, share.pages, share.kv_tokens, 1)):
                sums[ref][position] += amount
        for instance in instances.values():
            sums[instance.ref][1] += self.in_use.blocks(instance.uuid)
            booked = [
                instance.booked_tokens,
                instance.booked_pages,
                instance.booked_kv_tokens,
                instance.booked_rows,
            ]
            assert booked == sums[instance.ref], (
                f"{instance.manifest.name} has {booked} booked, not {sums[instance.ref]}"
            )
