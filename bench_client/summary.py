"""From exchanges to the numbers of a run. Definitions are AIPerf's, so that results can be compared:

- TTFT: first chunk with content - request sent.
- E2E: last chunk with content - request sent.
- TPOT: (E2E - TTFT) / (output tokens - 1), from 2 tokens on (AIPerf: inter token latency); tokens as the usage says.
- ITL: gaps between chunks with content, of all requests together (AIPerf: inter chunk latency).
- Rates divide by the duration: last content of any request - first request sent.
- Goodput: requests that met every bound of the SLO, per second. A request without a TPOT cannot miss it.

Percentiles interpolate linearly. Only requests without an error are measured; the others are counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from bench_client.records import Exchange
from bench_client.slo import Slo


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of one latency over a run, in milliseconds."""

    count: int
    mean: float
    minimum: float
    p50: float
    p90: float
    p99: float
    maximum: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second. None: nothing was measured, or the server did not say."""

    requests: int
    requests_ok: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    duration_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    requests_per_s: float
    tokens_output_per_s: float | None
    tokens_input_per_s: float | None
    tokens_input: int | None
    tokens_output: int | None
    tokens_cached: int | None
    cached_share: float | None
    """Prompt tokens read from a prefix cache, of all prompt tokens."""
    answers_short: int
    """Answers with fewer tokens than were asked for."""
    good: int | None
    good_share: float | None
    """Of all requests, failed ones included."""
    goodput_per_s: float | None
    client_lag_ms: Spread | None
    """How late the client's event loop was: the error of every stamp."""
    send_lag_ms: Spread | None
    """How long after their due time requests were sent (open loop)."""


def ttft_us(exchange: Exchange) -> int | None:
    return exchange.content_us[0] - exchange.sent_us if exchange.content_us else None


def e2e_us(exchange: Exchange) -> int | None:
    return exchange.content_us[-1] - exchange.sent_us if exchange.content_us else None


def tpot_us(exchange: Exchange) -> float | None:
    if not exchange.content_us or exchange.tokens_output is None or exchange.tokens_output < 2:
        return None
    return (exchange.content_us[-1] - exchange.content_us[0]) / (exchange.tokens_output - 1)


def itl_us(exchange: Exchange) -> list[int]:
    return [later - earlier for earlier, later in pairwise(exchange.content_us)]


def is_good(exchange: Exchange, slo: Slo) -> bool:
    values = {"ttft": ttft_us(exchange), "tpot": tpot_us(exchange), "e2e": e2e_us(exchange)}
    if not exchange.ok or values["ttft"] is None:
        return False
    return all(value is None or value <= slo[metric] for metric, value in values.items() if metric in slo)


def spread_ms(values_us: Iterable[float | None]) -> Spread | None:
    measured = np.array([value for value in values_us if value is not None], dtype=np.float64) / 1e3
    if not measured.size:
        return None
    p50, p90, p99 = np.percentile(measured, [50, 90, 99])
    return Spread(
        count=int(measured.size),
        mean=float(measured.mean()),
        minimum=float(measured.min()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        maximum=float(measured.max()),
    )


def summarise(exchanges: Sequence[Exchange], slo: Slo, lags_us: Sequence[int]) -> Summary:
    measured = [exchange for exchange in exchanges if exchange.ok]
    duration_s = _duration_s(measured)
    tokens_input = _total(exchange.tokens_input for exchange in measured)
    tokens_output = _total(exchange.tokens_output for exchange in measured)
    tokens_cached = _total(exchange.tokens_cached for exchange in measured)
    good = sum(is_good(exchange, slo) for exchange in exchanges) if slo else None
    return Summary(
        requests=len(exchanges),
        requests_ok=len(measured),
        errors=dict(Counter(exchange.error for exchange in exchanges if exchange.error).most_common()),
        error_examples={exchange.error: exchange.detail for exchange in reversed(exchanges) if exchange.error},
        duration_s=duration_s,
        ttft_ms=spread_ms(map(ttft_us, measured)),
        tpot_ms=spread_ms(map(tpot_us, measured)),
        itl_ms=spread_ms(gap for exchange in measured for gap in itl_us(exchange)),
        e2e_ms=spread_ms(map(e2e_us, measured)),
        requests_per_s=_rate(len(measured), duration_s) or 0.0,
        tokens_output_per_s=_rate(tokens_output, duration_s),
        tokens_input_per_s=_rate(tokens_input, duration_s),
        tokens_input=tokens_input,
        tokens_output=tokens_output,
        tokens_cached=tokens_cached,
        cached_share=tokens_cached / tokens_input if tokens_cached is not None and tokens_input else None,
        answers_short=sum((one.tokens_output or 0) < one.tokens_output_planned for one in measured),
        good=good,
        good_share=good / len(exchanges) if good is not None and exchanges else None,
        goodput_per_s=_rate(good, duration_s),
        client_lag_ms=spread_ms(lags_us),
        send_lag_ms=spread_ms(one.sent_us - one.scheduled_us for one in measured if one.scheduled_us is not None),
    )


def _duration_s(measured: Sequence[Exchange]) -> float:
    ends = [exchange.content_us[-1] for exchange in measured if exchange.content_us]
    return (max(ends) - min(exchange.sent_us for exchange in measured)) / 1e6 if ends else 0.0


def _rate(count: int | None, duration_s: float) -> float | None:
    return None if count is None else (count / duration_s if duration_s > 0 else 0.0)


def _total(counts: Iterable[int | None]) -> int | None:
    """None when no request said it, or one did not: a part of a sum is no sum."""
    known = list(counts)
    return sum(count for count in known if count is not None) if known and None not in known else None
