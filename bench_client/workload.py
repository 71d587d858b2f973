"""The requests of a run, in order: synthetic ones without end, or a trace's. Pure; randomness is seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench_client.lengths import Lengths
from bench_client.records import PlannedRequest
from bench_client.traces import Trace
from segue.errors import ConfigError


def synthetic(tokens_input: Lengths, tokens_output: Lengths, seed: int) -> Iterator[PlannedRequest]:
    """Prompts that share nothing; no arrival times."""
    rng = random.Random(f"{seed}/lengths")
    index = 0
    while True:
        yield PlannedRequest(index=index, tokens_input=tokens_input.draw(rng), tokens_output=tokens_output.draw(rng))
        index += 1


def from_trace(trace: Trace) -> Iterator[PlannedRequest]:
    for index, row in enumerate(trace.rows):
        yield PlannedRequest(
            index=index,
            tokens_input=row.tokens_input,
            tokens_output=row.tokens_output,
            arrival_us=row.arrival_us,
            hash_ids=row.hash_ids,
        )


def arrivals(rate: float, process: str, seed: int) -> Iterator[int]:
    """Microseconds of each arrival, the first at 0: `poisson` or `constant` at `rate` per second."""
    rng = random.Random(f"{seed}/arrivals")
    now_s = 0.0
    while True:
        yield round(now_s * 1e6)
        now_s += rng.expovariate(rate) if process == "poisson" else 1.0 / rate


def too_long(trace: Trace, model_len_max: int) -> list[int]:
    """Row numbers that prompt and answer together do not fit."""
    return [place for place, row in enumerate(trace.rows) if row.tokens_input + row.tokens_output > model_len_max]


def check_fits(tokens_input: Lengths, tokens_output: Lengths, model_len_max: int) -> None:
    """Raise ConfigError when a synthetic request of the typical size cannot fit."""
    typical = tokens_input.first + tokens_output.first
    if typical > model_len_max:
        raise ConfigError(
            f"--input-len {tokens_input} and --output-len {tokens_output} are {typical:g} tokens together; the model "
            f"takes {model_len_max}"
        )
