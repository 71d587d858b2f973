"""A workload: requests in order of arrival, what they ask for, and which prompts share a prefix.

Prompts are named by *prefix ids*, as the published traces do: the prompt is a run of spans of `span_tokens` tokens, and
equal ids at equal positions behind equal ids mean equal tokens. The last span may be partial, but has an id too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec


class WorkloadRequest(msgspec.Struct, frozen=True, array_like=True):
    arrival_us: int
    tokens_prompt: int
    tokens_output: int
    """What it will generate. Known to the engine alone."""
    prefix_ids: tuple[int, ...] = ()
    """One id for each span of the prompt; empty: shares nothing with anybody."""
    group: str = ""
    """Conversation or tenant, where the workload knows one."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: Sequence[WorkloadRequest]
    span_tokens: int = 512
    notes: tuple[str, ...] = ()
    """What was done to it (spread, scaled, cut), for the report."""

    @property
    def duration_us(self) -> int:
        return self.requests[-1].arrival_us - self.requests[0].arrival_us if self.requests else 0

    def digest(self) -> str:
        """SHA-256 over every request: names the workload in a report."""
        digest = hashlib.sha256(str(self.span_tokens).encode())
        for request in self.requests:
            digest.update(msgspec.msgpack.encode(request))
        return digest.hexdigest()[:16]


def sped_up(workload: Workload, factor: float) -> Workload:
    """The same requests `factor` times as fast. Raises ValueError unless `factor` is positive."""
    if not factor > 0:
        raise ValueError(f"speed-up must be positive, got {factor}")
    requests = [
        msgspec.structs.replace(request, arrival_us=round(request.arrival_us / factor)) for request in workload.requests
    ]
    return _noted(workload, requests, f"{factor:g}x as fast")


def sliced(workload: Workload, *, start: int = 0, count: int | None = None) -> Workload:
    """Requests `start` to `start + count`, from time 0 on."""
    chosen = workload.requests[start : None if count is None else start + count]
    origin_us = chosen[0].arrival_us if chosen else 0
    requests = [msgspec.structs.replace(request, arrival_us=request.arrival_us - origin_us) for request in chosen]
    return _noted(workload, requests, f"requests {start} to {start + len(chosen)}")


def with_bursts_spread(workload: Workload) -> Workload:
    """Requests of one tick spread evenly until the next tick: rounded arrivals show bursts which were none."""
    requests: list[WorkloadRequest] = []
    ticks = sorted({request.arrival_us for request in workload.requests})
    following = dict(zip(ticks, [*ticks[1:], ticks[-1]], strict=True)) if ticks else {}
    index = 0
    while index < len(workload.requests):
        tick_us = workload.requests[index].arrival_us
        end = index
        while end < len(workload.requests) and workload.requests[end].arrival_us == tick_us:
            end += 1
        for place in range(index, end):
            late_us = (following[tick_us] - tick_us) * (place - index) // (end - index)
            requests.append(msgspec.structs.replace(workload.requests[place], arrival_us=tick_us + late_us))
        index = end
    return _noted(workload, requests, "bursts spread")


def _noted(workload: Workload, requests: Sequence[WorkloadRequest], note: str) -> Workload:
    return msgspec.structs.replace(workload, requests=requests, notes=(*workload.notes, note))
