"""However requests are batched, chunked, cached, preempted or run ahead: the same tokens.

The reference is every request alone, its prompt in one chunk, nothing cached, one step at a time. Each case also shows
that what it is about did happen: hits, partial chunks, preemptions, plans in flight, several steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from matrix_cases import BLOCK_SIZE, PAGES, Case, run_requests

from segue.sampling_params import SamplingParams

Requests = Sequence[tuple[list[int], SamplingParams]]

TOKENS_MAX = 14
PAGES_FEW = 18
"""The longest request needs 16 of them, all sixteen together about 80: some must be preempted."""

LENGTHS = (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 112, 24)
"""Around block multiples; one that needs two chunks of the middle size even after its hit; the last prompt repeats
another of whole blocks."""


def make_requests() -> Requests:
    """Prompts that share prefixes; greedy and seeded sampling in turn, some with penalties, some that may stop."""
    trunk = [(37 * index) % 89 + 3 for index in range(max(LENGTHS))]
    requests = []
    for index, length in enumerate(LENGTHS):
        prompt = trunk[:length] if index % 3 else [*trunk[: length // 2], *reversed(trunk[length // 2 : length])]
        sampling = SamplingParams(
            temperature=0.0 if index % 2 == 0 else 0.9,
            top_k=0 if index % 4 else 20,
            top_p=1.0 if index % 5 else 0.9,
            frequency_penalty=0.4 if index % 4 == 3 else 0.0,
            repetition_penalty=1.2 if index % 6 == 2 else 1.0,
            seed=1000 + index,
            max_tokens=TOKENS_MAX,
            ignore_eos=index % 2 == 0,
        )
        requests.append((prompt, sampling))
    return requests


@pytest.fixture(scope="module")
def reference(toy_path: Path) -> dict[int, list[int]]:
    return run_requests(toy_path, Case(), make_requests()).tokens


def check_case(case: Case, toy_path: Path, reference: dict[int, list[int]]) -> None:
    run = run_requests(toy_path, case, make_requests())
    assert run.tokens == reference
    assert (run.tokens_cached > 0) == case.caching
    assert (run.preemptions > 0) == (case.pages < PAGES and case.together)
    assert (run.chunks_partial > 0) == (case.chunk < max(LENGTHS) or (case.together and case.chunk < sum(LENGTHS)))
    assert run.in_flight_max == case.depth + 1
    assert run.steps_max == case.steps


def test_reference_says_something(reference: dict[int, list[int]]) -> None:
    """Different prompts give different tokens, and not one token over and over."""
    assert len({tuple(tokens) for tokens in reference.values()}) >= len(LENGTHS) - 1
    assert all(len(set(tokens)) > 2 for tokens in reference.values() if len(tokens) == TOKENS_MAX)


COMPACT = [
    Case(caching=True),
    Case(together=True),
    Case(chunk=16),
    Case(chunk=64, together=True),
    Case(depth=1, together=True),
    Case(steps=4, together=True),
    Case(pages=PAGES_FEW, together=True),
    Case(caching=True, together=True, chunk=16, pages=PAGES_FEW, depth=1, steps=4),
]


@pytest.mark.parametrize("case", COMPACT, ids=str)
def test_tokens_do_not_depend_on_scheduling(case: Case, toy_path: Path, reference: dict[int, list[int]]) -> None:
    check_case(case, toy_path, reference)


FULL = [
    Case(caching, together, chunk, pages, depth, steps)
    for caching, together, chunk, pages, depth, steps in itertools.product(
        (False, True), (False, True), (16, 64, 512), (PAGES, PAGES_FEW), (0, 1), (1, 4)
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_matrix(case: Case, toy_path: Path, reference: dict[int, list[int]]) -> None:
    check_case(case, toy_path, reference)


def test_block_size_leaves_partial_blocks() -> None:
    assert {length % BLOCK_SIZE for length in LENGTHS} >= {0, 1, BLOCK_SIZE - 1}
