"""The options of one run, checked together before anything is sent."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from bench_client.lengths import Lengths
from bench_client.replay import Replay
from bench_client.slo import Slo
from bench_client.target import PATHS
from segue.errors import ConfigError

CONCURRENCY_MAX = 8192
RATE_MAX = 100_000.0
ARRIVALS = ("poisson", "constant")


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `concurrency`, `rate` and `trace` drives the run; a trace may be capped by neither."""

    url: str
    model: str = ""
    endpoint: str = "completions"
    concurrency: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    trace: str = ""
    replay: Replay = Replay()
    skip_too_long: bool = False
    tokens_input: Lengths = Lengths("fixed", 128)
    tokens_output: Lengths = Lengths("fixed", 64)
    requests: int | None = None
    seconds: float | None = None
    grace_s: float = 30.0
    warmup: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    token_ids: tuple[int, int] | None = None
    seed: int = 0
    slo: Slo = {}

    @property
    def mode(self) -> str:
        if self.trace:
            return f"trace {self.trace.rpartition('/')[2]}"
        if self.rate is not None:
            return f"{self.rate:g} requests/s, {self.arrival} arrivals"
        return f"concurrency {self.concurrency}"


def parse_token_ids(text: str) -> tuple[int, int] | None:
    """`1000-30000`, both ends included; empty: learned from the server."""
    if not text:
        return None
    low, dash, high = text.partition("-")
    if not dash or not low.isdecimal() or not high.isdecimal() or int(low) >= int(high):
        raise ConfigError(f"--token-ids: {text!r} is no range such as 1000-30000")
    return int(low), int(high)


def check_options(options: BenchOptions) -> None:
    """Raise ConfigError that names the option."""
    _check_drive(options)
    parts = urlsplit(options.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url: {options.url!r} must be http://HOST:PORT or https://HOST:PORT")
    if options.endpoint not in PATHS:
        raise ConfigError(f"--endpoint: {options.endpoint!r} must be one of {', '.join(PATHS)}")
    if options.endpoint == "chat" and options.token_ids is not None:
        raise ConfigError("--token-ids: the chat API takes text; use --endpoint completions")
    if options.arrival not in ARRIVALS:
        raise ConfigError(f"--arrival: {options.arrival!r} must be one of {', '.join(ARRIVALS)}")
    _check_range("--requests", options.requests, 1, 10**9)
    _check_range("--duration", options.seconds, 0.01, 10**7)
    _check_range("--grace", options.grace_s, 0, 10**7)
    _check_range("--warmup", options.warmup, 0, 10**6)
    _check_range("--timeout", options.timeout_s, 0.01, 10**7)
    _check_range("--temperature", options.temperature, 0, 2)


def _check_drive(options: BenchOptions) -> None:
    given = {"--concurrency": options.concurrency, "--rate": options.rate, "--trace": options.trace or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ConfigError(f"give one of {', '.join(given)}" + (f", not {' and '.join(named)}" if named else ""))
    _check_range("--concurrency", options.concurrency, 1, CONCURRENCY_MAX)
    _check_range("--rate", options.rate, 1e-6, RATE_MAX)
    if not options.trace and options.requests is None and options.seconds is None:
        raise ConfigError("how long: give --requests or --duration")
    if not options.trace and (options.replay != Replay() or options.skip_too_long):
        raise ConfigError("--slice, --speed, --shrink, --spread and --skip-too-long need a --trace")


def _check_range(option: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{option}: {value:g} is not in {low:g} .. {high:g}")
