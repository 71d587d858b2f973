"""What `segue simulate` and `segue plan` are given: traces, policies, tiers, files to write. Errors name the option."""

from __future__ import annotations

import math
from pathlib import Path

from segue.errors import ConfigError
from simulator.hardware import Instance
from simulator.policies import POLICIES
from simulator.tiers import TierSpec
from simulator.traces import read_trace
from simulator.workload import Workload, sliced, sped_up, with_bursts_spread


def read_workload(trace: Path, kind: str, start: int, count: int, speedup: float, spread: bool) -> Workload:
    """Raises ConfigError or TraceError; an interval that makes no sense is refused before the file is read."""
    for option, value in (("--start", start), ("--count", count)):
        if value < 0:
            raise ConfigError(f"{option}: {value} is less than 0")
    if not 0 < speedup < math.inf:
        raise ConfigError(f"--speedup: speed-up must be positive, got {speedup:g}")
    workload = read_trace(trace, kind)
    if start or count:
        workload = sliced(workload, start=start, count=count or None)
    if not workload.requests:
        raise ConfigError(f"{trace}: no requests from {start} on")
    if spread:
        workload = with_bursts_spread(workload)
    return workload if speedup == 1.0 else sped_up(workload, speedup)


def lower_tiers(instance: Instance, listed: str) -> tuple[TierSpec, ...]:
    tiers = []
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        name, _, tokens = entry.partition("=")
        if tokens and not tokens.isdecimal():
            raise ConfigError(f"--tiers {entry!r}: NAME or NAME=TOKENS")
        tiers.append(instance.tier(name, int(tokens or 0)))
    return tuple(tiers)


def check_writable(out: Path | None) -> None:
    """Before the simulation, so that an hour of it is not lost to a typing error."""
    if out is None:
        return
    try:
        out.touch()
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}") from error


def policy_names(names: str) -> list[str]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return chosen
