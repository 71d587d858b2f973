"""How a trace is cut, squeezed and sped up before it is replayed. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from bench_client.traces import Trace, TraceRow
from segue.errors import ConfigError

SPEED_MAX = 1e6

SLICE = re.compile(r"(?P<begin>\d*):(?P<end>\d*)(?P<seconds>s)?")


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """`cut` is rows `100:400`, or seconds `60:120s`, ends excluded; either end may be left out."""

    cut: str = ""
    speed: float = 1.0
    """2 replays twice as fast."""
    shrink: int = 1
    """Lengths and blocks are divided by this, so that sharing stays as it is and small models can be asked."""
    spread: bool = False
    """Arrivals of one tick are spread evenly until the next one; otherwise they stay a burst."""

    def describe(self) -> str:
        parts = [f"rows {self.cut}" if self.cut else "all rows", f"speed x{self.speed:g}"]
        if self.shrink > 1:
            parts.append(f"lengths / {self.shrink}")
        parts.append("ticks spread" if self.spread else "bursts kept")
        return ", ".join(parts)


def apply_replay(trace: Trace, replay: Replay) -> Trace:
    """Raise ConfigError that names the option. Arrivals count from the first row that is left."""
    _check(trace, replay)
    rows = _cut(trace, replay.cut)
    if replay.spread:
        rows = _spread(rows)
    start_us = rows[0].arrival_us
    return msgspec.structs.replace(
        trace,
        rows=[_squeezed(row, start_us, replay) for row in rows],
        block_tokens=trace.block_tokens // replay.shrink,
    )


def _check(trace: Trace, replay: Replay) -> None:
    if not 0 < replay.speed <= SPEED_MAX:
        raise ConfigError(f"--speed: {replay.speed:g} must be more than 0 and at most {SPEED_MAX:g}")
    if replay.shrink < 1:
        raise ConfigError(f"--shrink: {replay.shrink} must be at least 1")
    if trace.block_tokens % replay.shrink:
        raise ConfigError(f"--shrink: {replay.shrink} must divide the trace's blocks of {trace.block_tokens} tokens")


def _cut(trace: Trace, cut: str) -> list[TraceRow]:
    if not cut:
        return trace.rows
    match = SLICE.fullmatch(cut.strip())
    if match is None:
        raise ConfigError(f"--slice: {cut!r} is neither rows such as 100:400 nor seconds such as 60:120s")
    begin, end = int(match["begin"] or 0), int(match["end"]) if match["end"] else None
    if match["seconds"]:
        end_us = float("inf") if end is None else end * 1e6
        rows = [row for row in trace.rows if begin * 1e6 <= row.arrival_us < end_us]
    else:
        rows = trace.rows[begin:end]
    if not rows:
        raise ConfigError(f"--slice: {cut} leaves none of the {len(trace.rows)} rows of {trace.source}")
    return rows


def _spread(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """The last tick keeps its burst: nothing says how long it is."""
    spread: list[TraceRow] = []
    begin = 0
    while begin < len(rows):
        tick_us = rows[begin].arrival_us
        end = begin
        while end < len(rows) and rows[end].arrival_us == tick_us:
            end += 1
        gap_us = rows[end].arrival_us - tick_us if end < len(rows) else 0
        spread += [
            msgspec.structs.replace(row, arrival_us=tick_us + gap_us * place // (end - begin))
            for place, row in enumerate(rows[begin:end])
        ]
        begin = end
    return spread


def _squeezed(row: TraceRow, start_us: int, replay: Replay) -> TraceRow:
    """A prompt keeps the number of its blocks: ceil(ceil(a / s) / (b / s)) == ceil(a / b) when s divides b."""
    return TraceRow(
        arrival_us=round((row.arrival_us - start_us) / replay.speed),
        tokens_input=-(-row.tokens_input // replay.shrink),
        tokens_output=-(-row.tokens_output // replay.shrink),
        hash_ids=row.hash_ids,
    )
