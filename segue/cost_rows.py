"""From rows of benchmark results to measurements that a cost model can be fitted to, and how well it then fits.

| shape, metric | is |
| --- | --- |
| `B x L`, step | a decode step of B sequences that hold L tokens each |
| `1 x N`, ttft | a prefill of N tokens |
| `N on C cached`, ttft | a prefill of N tokens behind C cached ones |
| `decode, batch B, after L`, engine (tokens/s) | B / rate: as the first |
| `prefill N`, engine (tokens/s) | N / rate: as the second |
| `prefix hit C + N`, cached | as the third |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from segue.cost_model import CostModel, DecodeRow, PrefillRow, fit_decode, fit_prefill

_US = {"us": 1.0, "ms": 1e3, "s": 1e6}

_STEP = re.compile(r"(\d+) x (\d+)")
_ON_CACHED = re.compile(r"(\d+) on (\d+) cached")
_DECODE_RATE = re.compile(r"decode, batch (\d+), after (\d+)")
_PREFILL_RATE = re.compile(r"prefill (\d+)")
_PREFIX_HIT = re.compile(r"prefix hit (\d+) \+ (\d+)")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    prefills: list[PrefillRow]
    decodes: list[DecodeRow]


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model and what it leaves over: median and largest relative error over its own rows."""

    model: CostModel
    prefill_error_median: float
    prefill_error_max: float
    decode_error_median: float
    decode_error_max: float


def newest(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Those of the code that was measured last: another state of the code is another engine, with other costs."""
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def read_rows(rows: Iterable[Mapping[str, str]]) -> Measured:
    """Measurements among `rows` (mappings with shape, metric, value, unit); others are left out."""
    prefills: list[PrefillRow] = []
    decodes: list[DecodeRow] = []
    for row in rows:
        measured = _measurement(row["shape"], row["metric"], float(row["value"]), row["unit"])
        if isinstance(measured, PrefillRow):
            prefills.append(measured)
        elif measured is not None:
            decodes.append(measured)
    return Measured(prefills=prefills, decodes=decodes)


def fit_rows(measured: Measured, kv_token_bytes: int) -> Fitted:
    """Raises ValueError where there are too few rows, or none of a kind."""
    prefill, decode = fit_prefill(measured.prefills), fit_decode(measured.decodes)
    of_prefill = [abs(prefill.us(row.new, row.cached) / row.us - 1) for row in measured.prefills]
    of_decode = [abs(decode.us(row.batch, row.kv_tokens) / row.us - 1) for row in measured.decodes]
    return Fitted(
        model=CostModel(prefill=prefill, decode=decode, kv_token_bytes=kv_token_bytes),
        prefill_error_median=median(of_prefill),
        prefill_error_max=max(of_prefill),
        decode_error_median=median(of_decode),
        decode_error_max=max(of_decode),
    )


def _measurement(shape: str, metric: str, value: float, unit: str) -> PrefillRow | DecodeRow | None:
    if unit == "tokens/s" and metric == "engine":
        return _of_rate(shape, value)
    if unit not in _US:
        return None
    us = value * _US[unit]
    if metric == "step" and (match := _STEP.fullmatch(shape)):
        batch, length = _numbers(match)
        return DecodeRow(batch, float(batch * length), us)
    if metric == "ttft" and (match := _STEP.fullmatch(shape)):
        batch, length = _numbers(match)
        return PrefillRow(length, 0, us) if batch == 1 else None
    if metric == "ttft" and (match := _ON_CACHED.fullmatch(shape)):
        new, cached = _numbers(match)
        return PrefillRow(new, cached, us)
    if metric == "cached" and (match := _PREFIX_HIT.fullmatch(shape)):
        cached, new = _numbers(match)
        return PrefillRow(new, cached, us)
    return None


def _of_rate(shape: str, tokens_per_s: float) -> PrefillRow | DecodeRow | None:
    if match := _DECODE_RATE.fullmatch(shape):
        batch, length = _numbers(match)
        return DecodeRow(batch, float(batch * length), batch / tokens_per_s * 1e6)
    if match := _PREFILL_RATE.fullmatch(shape):
        (tokens,) = _numbers(match)
        return PrefillRow(tokens, 0, tokens / tokens_per_s * 1e6)
    return None


def _numbers(match: re.Match[str]) -> Sequence[int]:
    return [int(group) for group in match.groups()]
