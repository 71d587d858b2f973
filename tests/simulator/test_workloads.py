"""Generated and changed workloads."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from simulator.generators import (
    Lengths,
    bursty_arrivals_us,
    conversations,
    independent,
    poisson_arrivals_us,
    shared_prefix_groups,
)
from simulator.prompt_tokens import PromptTokens
from simulator.traces import read_trace
from simulator.workload import Workload, WorkloadRequest, sliced, sped_up, with_bursts_spread

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("arrivals", [poisson_arrivals_us, bursty_arrivals_us])
def test_arrivals_come_at_the_asked_rate_and_never_go_back(arrivals: object) -> None:
    times = list(itertools.islice(arrivals(5.0, random.Random(1)), 20_000))  # type: ignore[operator]
    assert times == sorted(times)
    assert 20_000 / (times[-1] / 1e6) == pytest.approx(5.0, rel=0.1)


def test_bursty_arrivals_vary_more_than_poisson() -> None:
    def spread(times: list[int]) -> float:
        counts = [0] * (times[-1] // 5_000_000 + 1)
        for at_us in times:
            counts[at_us // 5_000_000] += 1
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / len(counts) / mean

    poisson = list(itertools.islice(poisson_arrivals_us(5.0, random.Random(1)), 5_000))
    bursty = list(itertools.islice(bursty_arrivals_us(5.0, random.Random(1)), 5_000))
    assert spread(bursty) > 3 * spread(poisson)


def test_the_same_seed_makes_the_same_workload() -> None:
    def make(seed: int) -> Workload:
        return independent(3.0, 50, seed, Lengths(median=500, sigma=1.0), Lengths(median=100))

    assert make(1).digest() == make(1).digest() != make(2).digest()


def test_groups_share_their_prefix_and_users_their_question() -> None:
    workload = shared_prefix_groups([(20.0, 30.0)], seed=1, groups=3, users=2)
    prefixes = {request.prefix_ids[: 6_000 // workload.span_tokens] for request in workload.requests}
    prompts = {request.prefix_ids for request in workload.requests}
    assert (len(prefixes), len(prompts)) == (3, 6)
    assert {request.tokens_prompt for request in workload.requests} == {7_200}
    assert len(workload.requests) == pytest.approx(600, rel=0.15)


def test_a_turn_repeats_the_turns_before_it_and_comes_later() -> None:
    workload = conversations(1.0, 300, seed=2)
    by_talk: dict[str, list[WorkloadRequest]] = {}
    for request in workload.requests:
        by_talk.setdefault(request.group, []).append(request)
    longer = [talk for talk in by_talk.values() if len(talk) > 1]
    assert len(longer) > 20
    for talk in longer:
        for earlier, later in itertools.pairwise(talk):
            full = earlier.tokens_prompt // workload.span_tokens
            assert later.prefix_ids[:full] == earlier.prefix_ids[:full]
            assert later.arrival_us > earlier.arrival_us
            assert later.tokens_prompt > earlier.tokens_prompt + earlier.tokens_output


def test_equal_ids_give_equal_tokens_and_others_differ() -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    tokens = PromptTokens(workload)
    first, second = tokens.token_ids(0), tokens.token_ids(1)
    assert len(first) == 4 * workload.requests[0].tokens_prompt
    assert first[: 512 * 4] == second[: 512 * 4]
    assert first[512 * 4 : 1024 * 4] != second[512 * 4 : 1024 * 4]


def test_prompts_without_ids_share_nothing() -> None:
    tokens = PromptTokens(Workload(name="w", requests=[WorkloadRequest(0, 700, 1), WorkloadRequest(0, 700, 1)]))
    assert tokens.token_ids(0)[: 512 * 4] != tokens.token_ids(1)[: 512 * 4]


def test_spreading_keeps_order_and_stays_before_the_next_tick() -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    spread = with_bursts_spread(workload)
    times = [request.arrival_us for request in spread.requests]
    assert times == sorted(times)
    assert len(set(times)) > len({request.arrival_us for request in workload.requests})
    for before, after in zip(workload.requests, spread.requests, strict=True):
        assert before.arrival_us <= after.arrival_us < before.arrival_us + 3_000_001


def test_speed_and_slices_are_noted() -> None:
    workload = sped_up(sliced(read_trace(DATA / "conversation_60.jsonl"), start=40, count=10), 2.0)
    assert (len(workload.requests), workload.requests[0].arrival_us) == (10, 0)
    assert workload.notes == ("requests 40 to 50", "2x as fast")
    with pytest.raises(ValueError, match="must be positive"):
        sped_up(workload, 0.0)
