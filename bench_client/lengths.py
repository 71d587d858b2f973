"""Distributions of prompt and answer lengths: `128`, `uniform:64,256`, `normal:512,64`, `lognormal:512,0.6`."""

from __future__ import annotations

import random

import msgspec

from segue.errors import ConfigError

TOKENS_MAX = 1 << 20
"""Longer than any model's context; keeps a slip of the finger from filling the memory."""

FORMS = "N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"


class Lengths(msgspec.Struct, frozen=True):
    """Draws whole numbers of tokens in 1 .. TOKENS_MAX. `kind` is fixed, uniform, normal or lognormal."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "fixed":
                drawn = self.first
            case "uniform":
                drawn = rng.randint(int(self.first), int(self.second))
            case "normal":
                drawn = rng.gauss(self.first, self.second)
            case _:
                drawn = self.first * rng.lognormvariate(0.0, self.second)
        return min(max(round(drawn), 1), TOKENS_MAX)

    def __str__(self) -> str:
        return f"{self.first:g}" if self.kind == "fixed" else f"{self.kind}:{self.first:g},{self.second:g}"


def parse_lengths(text: str, option: str) -> Lengths:
    """Raise ConfigError that names the option and what is wrong."""
    kind, colon, numbers = text.strip().partition(":")
    if not colon:
        kind, numbers = "fixed", kind
    try:
        values = [float(part) for part in numbers.split(",")]
    except ValueError:
        values = []
    if kind not in ("fixed", "uniform", "normal", "lognormal") or len(values) != (1 if kind == "fixed" else 2):
        raise ConfigError(f"{option}: {text!r} is no length; give {FORMS}")
    lengths = Lengths(kind, *values)
    _check(lengths, text, option)
    return lengths


def _check(lengths: Lengths, text: str, option: str) -> None:
    if not 1 <= lengths.first <= TOKENS_MAX:
        raise ConfigError(f"{option}: {text!r}: {lengths.first:g} is not in 1 .. {TOKENS_MAX}")
    if lengths.kind in ("fixed", "uniform") and not (lengths.first.is_integer() and lengths.second.is_integer()):
        raise ConfigError(f"{option}: {text!r}: tokens come in whole numbers")
    if lengths.kind == "uniform" and not lengths.first <= lengths.second <= TOKENS_MAX:
        raise ConfigError(f"{option}: {text!r}: the upper end is not in {lengths.first:g} .. {TOKENS_MAX}")
    if lengths.kind in ("normal", "lognormal") and not 0 <= lengths.second <= TOKENS_MAX:
        raise ConfigError(f"{option}: {text!r}: the spread is not in 0 .. {TOKENS_MAX}")
