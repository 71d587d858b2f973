"""Bulk transfers between instances: latency, then bandwidth shared fairly at the sender's and the receiver's end."""

from __future__ import annotations

from collections.abc import Callable

from segue.cost_model import LinkCost
from simulator.event_heap import EventHeap, Rank


class _Transfer:
    __slots__ = ("at_us", "bytes_left", "on_done", "rate", "source", "target", "version")

    def __init__(self, source: str, target: str, size_bytes: float, on_done: Callable[[], None], now_us: int) -> None:
        self.source = source
        self.target = target
        self.bytes_left = size_bytes
        self.on_done = on_done
        self.rate = 0.0
        self.at_us = now_us
        self.version = 0
        """Counts changes of rate: a completion that was planned before is void."""


class SharedLinks:
    """Each instance has one egress and one ingress of `cost`; a transfer gets the lesser of its equal shares."""

    def __init__(self, heap: EventHeap, cost: Callable[[str], LinkCost]) -> None:
        self._heap = heap
        self._cost = cost
        self._egress: dict[str, list[_Transfer]] = {}
        self._ingress: dict[str, list[_Transfer]] = {}
        self.bytes_moved = 0.0

    def send(self, source: str, target: str, size_bytes: float, on_done: Callable[[], None]) -> None:
        """Call `on_done` when all bytes have arrived."""
        self.bytes_moved += size_bytes
        begin_us = self._heap.now_us + round(self._cost(source).latency_us)
        transfer = _Transfer(source, target, size_bytes, on_done, begin_us)
        self._heap.push(begin_us, Rank.NETWORK, lambda: self._begin(transfer))

    def _begin(self, transfer: _Transfer) -> None:
        self._egress.setdefault(transfer.source, []).append(transfer)
        self._ingress.setdefault(transfer.target, []).append(transfer)
        self._share_anew(transfer)

    def _share_anew(self, changed: _Transfer) -> None:
        """Rates of everything that shares an end with `changed`."""
        now_us = self._heap.now_us
        touched = dict.fromkeys([*self._egress[changed.source], *self._ingress[changed.target]])
        for transfer in touched:
            transfer.bytes_left -= transfer.rate * (now_us - transfer.at_us)
            transfer.at_us = now_us
            out = self._cost(transfer.source).bytes_per_us / len(self._egress[transfer.source])
            into = self._cost(transfer.target).bytes_per_us / len(self._ingress[transfer.target])
            transfer.rate = min(out, into)
            transfer.version += 1
            self._plan_end(transfer, transfer.version)

    def _plan_end(self, transfer: _Transfer, version: int) -> None:
        left_us = max(0, -int(-transfer.bytes_left // transfer.rate))
        self._heap.push(self._heap.now_us + left_us, Rank.NETWORK, lambda: self._end(transfer, version))

    def _end(self, transfer: _Transfer, version: int) -> None:
        if transfer.version != version:
            return
        self._egress[transfer.source].remove(transfer)
        self._ingress[transfer.target].remove(transfer)
        transfer.version += 1
        self._share_anew(transfer)
        transfer.on_done()
