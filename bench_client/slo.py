"""Service-level objectives: `ttft=2000ms,tpot=50ms`. A request is good when it meets every bound."""

from __future__ import annotations

import math
import re

from segue.errors import ConfigError

METRICS = ("ttft", "tpot", "e2e")

BOUND = re.compile(r"(?P<metric>\w+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>us|ms|s)?")
UNIT_US = {"us": 1, "ms": 1_000, "s": 1_000_000}

Slo = dict[str, int]
"""Metric -> bound in microseconds; empty: no objective."""


def parse_slo(text: str, option: str = "--slo") -> Slo:
    """A number without a unit means milliseconds. Raise ConfigError that names the part."""
    slo: Slo = {}
    for part in text.split(",") if text.strip() else ():
        match = BOUND.fullmatch(part.strip())
        if match is None or match["metric"] not in METRICS:
            raise ConfigError(
                f"{option}: {part.strip()!r} is no bound such as ttft=2000ms; known: {', '.join(METRICS)}"
            )
        bound_us = round(float(match["number"]) * UNIT_US[match["unit"] or "ms"])
        if match["metric"] in slo:
            raise ConfigError(f"{option}: {match['metric']} is bounded twice")
        if not 0 < bound_us < math.inf:
            raise ConfigError(f"{option}: {part.strip()!r}: a bound must be more than 0")
        slo[match["metric"]] = bound_us
    return slo


def describe_slo(slo: Slo) -> str:
    return ", ".join(f"{metric} ≤ {bound_us / 1000:g} ms" for metric, bound_us in slo.items()) or "none"
