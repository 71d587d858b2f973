"""Workloads made from a seed: arrival processes, conversations with think time, groups that share a prefix."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import msgspec

from simulator.workload import Workload, WorkloadRequest


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal token counts: median and spread (sigma of the logarithm), cut to [1, longest]."""

    median: float
    sigma: float = 0.0
    longest: int = 131_072

    def draw(self, random_source: random.Random) -> int:
        value = self.median * random_source.lognormvariate(0.0, self.sigma) if self.sigma else self.median
        return min(max(1, round(value)), self.longest)


def poisson_arrivals_us(rate: float, random_source: random.Random) -> Iterator[int]:
    """Endless. `rate` is requests a second."""
    at_s = 0.0
    while True:
        at_s += random_source.expovariate(rate)
        yield round(at_s * 1e6)


def bursty_arrivals_us(
    rate: float, random_source: random.Random, *, factor: float = 4.0, on_s: float = 10.0, off_s: float = 30.0
) -> Iterator[int]:
    """Endless; a Poisson process that is `factor` times as fast in bursts (exponential, mean `on_s`) as between them
    (mean `off_s`), `rate` requests a second on average."""
    quiet = rate * (on_s + off_s) / (factor * on_s + off_s)
    at_s, bursting = 0.0, False
    until_s = random_source.expovariate(1 / off_s)
    while True:
        step_s = random_source.expovariate(quiet * factor if bursting else quiet)
        if at_s + step_s < until_s:
            at_s += step_s
            yield round(at_s * 1e6)
        else:
            at_s, bursting = until_s, not bursting
            until_s += random_source.expovariate(1 / (on_s if bursting else off_s))


def independent(
    rate: float, count: int, seed: int, prompt: Lengths, output: Lengths, *, bursty: bool = False
) -> Workload:
    """`count` requests that share nothing."""
    source = random.Random(seed)
    arrivals = bursty_arrivals_us(rate, source) if bursty else poisson_arrivals_us(rate, source)
    requests = [
        WorkloadRequest(arrival_us, prompt.draw(source), output.draw(source))
        for arrival_us in itertools.islice(arrivals, count)
    ]
    return Workload(name=f"{'bursty' if bursty else 'poisson'}-{rate:g}", requests=requests)


def shared_prefix_groups(
    rates: list[tuple[float, float]],
    seed: int,
    *,
    groups: int = 150,
    users: int = 5,
    prefix_tokens: int = 6_000,
    question_tokens: int = 1_200,
    output_tokens: int = 1_000,
) -> Workload:
    """Claim C6: every group has a prefix, every user of a group a question of its own; each request is a user drawn
    evenly. `rates` is a ladder of (requests a second, seconds)."""
    source = random.Random(seed)
    span = 16 * 25  # divides the prefix of the claim (6,000 = 15 spans) and its question (1,200 = 3 spans)
    if prefix_tokens % span or question_tokens % span:
        span = 16
    spans_prefix, spans_question = prefix_tokens // span, -(-question_tokens // span)
    requests = []
    start_us = 0
    for rate, seconds in rates:
        for at_us in poisson_arrivals_us(rate, source):
            if at_us >= seconds * 1e6:
                break
            group, user = source.randrange(groups), source.randrange(users)
            prefix = tuple(group * spans_prefix + index for index in range(spans_prefix))
            first = groups * spans_prefix + (group * users + user) * spans_question
            question = tuple(first + index for index in range(spans_question))
            requests.append(
                WorkloadRequest(
                    start_us + at_us, prefix_tokens + question_tokens, output_tokens, prefix + question, str(group)
                )
            )
        start_us += round(seconds * 1e6)
    return Workload(name="shared-prefix-groups", requests=requests, span_tokens=span)


def conversations(
    rate: float,
    count: int,
    seed: int,
    *,
    turns_mean: float = 4.0,
    think_s: float = 20.0,
    system_tokens: int = 512,
    turn: Lengths | None = None,
    output: Lengths | None = None,
    reply_s_per_token: float = 0.03,
    span_tokens: int = 64,
) -> Workload:
    """`count` requests of conversations that start at `rate` a second. Each turn repeats the history and what was
    answered, after the answer (at a nominal speed) and an exponential think time; turns are geometric in number."""
    source = random.Random(seed)
    turn = turn or Lengths(median=200, sigma=1.0, longest=8_192)
    output = output or Lengths(median=250, sigma=0.7, longest=2_048)
    ids = itertools.count(1)
    system = tuple(next(ids) for _ in range(system_tokens // span_tokens))
    starts = poisson_arrivals_us(rate, source)
    pending: list[tuple[int, int, tuple[int, ...], int]] = []
    """(arrival, conversation, ids of the full spans so far, tokens of history)."""
    requests: list[WorkloadRequest] = []
    start_us, talks = next(starts), itertools.count()
    while len(requests) < count:
        while not pending or start_us <= pending[0][0]:
            heapq.heappush(pending, (start_us, next(talks), system, len(system) * span_tokens))
            start_us = next(starts)
        at_us, talk, known, history = heapq.heappop(pending)
        prompt, answer = history + turn.draw(source), output.draw(source)
        spans = known + tuple(next(ids) for _ in range(-(-prompt // span_tokens) - len(known)))
        requests.append(WorkloadRequest(at_us, prompt, answer, spans, str(talk)))
        if source.random() < 1 - 1 / turns_mean:
            wait_s = answer * reply_s_per_token + source.expovariate(1 / think_s)
            full = spans[: prompt // span_tokens]
            heapq.heappush(pending, (at_us + round(wait_s * 1e6), talk, full, prompt + answer))
    return Workload(name=f"conversations-{rate:g}", requests=requests, span_tokens=span_tokens)
