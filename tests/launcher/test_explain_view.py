"""What `segue explain` shows, in a terminal of 80 columns as in a wider one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from launcher.explain import choices_table, headlines, notes, recent_table
from launcher.rpc_client import ExplainedAttempt, ExplainedChoice


def choice(prefill: str, decode: str, source: str = "", verdict: str = "") -> ExplainedChoice:
    return ExplainedChoice(
        prefill=prefill,
        decode=decode,
        source=source,
        cost=0.0123,
        tokens_compute=120_000,
        tokens_cached=40_960,
        verdict=verdict,
        is_predicted=True,
        queue_us=120e3,
        ttft_us=1.2e6,
        ttft_q90_us=1.9e6,
        batch=12.3,
        tpot_us=23.4e3,
        tpot_q90_us=33.4e3,
    )


def attempt(**changes: Any) -> ExplainedAttempt:
    fields: dict[str, Any] = {
        "request_id": "cmpl-0123456789abcdef~gw1",
        "attempt": 1,
        "tenant": "",
        "priority": 0,
        "tokens_known": 16_000,
        "waited_us": 1200,
        "decision": "routed",
        "reason": "meets the objectives",
        "choices": [
            choice("prefill-0", "decode-0", verdict="chosen"),
            choice("prefill-12", "decode-10", "prefill-0", "would miss the objective of ttft by 4.2 s"),
            choice("", "decode-1"),
        ],
        "choices_total": 9,
        "ttft_us": 1_300_000,
        "tpot_us": 20_000.0,
        "tokens_generated": 9,
        "age_us": 1_500_000,
        "prefill_let_go": False,
        "ended": "stop",
    }
    return ExplainedAttempt(**{**fields, **changes})


def lines_of(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_choices_is_one_line_for_each_and_cuts_nothing(width: int) -> None:
    title, header, *rows = lines_of(choices_table(attempt()), width)
    assert "3 of 9 choices" in title
    names = ["prefill", "decode", "cost", "new", "cached", "queue", "TTFT", "q90", "batch", "TPOT", "q90"]
    assert header.split() == names
    assert len(rows) == 3
    assert "…" not in "".join([header, *rows])


def test_what_a_table_has_no_room_for_is_said_below_it() -> None:
    assert notes(attempt()) == [
        "1: chosen",
        "2: prefix from prefill-0, would miss the objective of ttft by 4.2 s",
    ]


def test_a_prefill_instance_that_was_let_go_is_not_shown_as_the_one_that_computed() -> None:
    """Clients see P as "-" then."""
    let_go = attempt(prefill_let_go=True)
    assert any("prefill-0 was let go" in line for line in headlines(let_go))
    assert "(decode)" in lines_of(choices_table(let_go), 80)[2]
    assert notes(let_go)[0] == "1: chosen, prefilled at decode"
    row = lines_of(recent_table([let_go]), 80)[2].split()
    assert row == [let_go.request_id, "1.5", "s", "-", "decode-0", "finished", "(stop)"]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "finished (stop)"),
        ({"ended": "failed by d0: gone"}, "failed by d0: gone"),
        ({"ended": ""}, "running"),
        ({"decision": "rejected", "choices": [], "ended": ""}, "rejected"),
    ],
)
def test_recent_requests_have_a_state(changes: dict[str, Any], state: str) -> None:
    assert lines_of(recent_table([attempt(**changes)]), 80)[2].rstrip().endswith(f" {state}")
