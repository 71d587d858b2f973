"""Pages promised to sequences whose K/V is on its way from another instance: reserve, then take or abort."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from segue.block_pool import BlockPool
from segue.errors import InternalError
from segue.planner_records import Reservation


class Reservations:
    """Open reservations by sequence. Cached pages are referenced, new ones held: nobody reads or evicts them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: dict[int, Reservation] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._open

    def reserve(self, seq: int, tokens_total: int, hashes: Seq[bytes], spare: int) -> Reservation | None:
        """Pages for `tokens_total` positions if `spare` pages are left then. The block of the last position is never
        taken from the cache: whoever computes it must be able to write it."""
        size = self._pool.block_size
        cached = self._pool.match(hashes[: (tokens_total - 1) // size])
        count = -(-tokens_total // size) - len(cached)
        if not self._pool.can_allocate(count + spare, cached):
            return None
        self._pool.acquire(cached)
        new = self._pool.allocate(count)
        self._pool.hold(new)
        reservation = self._open[seq] = Reservation(cached, new, seq)
        return reservation

    def take(self, reservation: Reservation) -> None:
        """The pages become their taker's, to read and write."""
        self._close(reservation)
        self._pool.unhold(reservation.pages_new)

    def abort(self, reservation: Reservation, quarantine: bool) -> None:
        """Give the pages back, or keep the new ones away from everybody until `pool.unquarantine`."""
        self._close(reservation)
        self._pool.release(reservation.pages_cached)
        if quarantine:
            self._pool.quarantine(reservation.pages_new)
        else:
            self._pool.unhold(reservation.pages_new)
            self._pool.release(reservation.pages_new)

    def tables(self) -> list[list[int]]:
        """Pages referenced but not held, as block tables."""
        return [reservation.pages_cached for reservation in self._open.values()]

    def _close(self, reservation: Reservation) -> None:
        if self._open.get(reservation.seq) is not reservation:
            raise InternalError(f"the reservation of sequence {reservation.seq} is not open")
        del self._open[reservation.seq]
