"""The table that `segue simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from simulator.comparison import Run, common_notes, highest_rates
from simulator.report import RunSummary

COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "policy": lambda each: each.policy + ("" if each.complete else " (part)"),
    "req/s": lambda each: f"{each.offered_per_s:.2f}",
    "done/rej/fail": lambda each: f"{each.completed}/{each.rejected}/{each.failed}",
    "SLO %": lambda each: f"{100 * each.attainment:.1f}",
    "good/s": lambda each: f"{each.goodput_per_s:.2f}",
    "TTFT s": lambda each: f"{each.ttft_mean_s:.2f}",
    "p90": lambda each: f"{each.ttft_p90_s:.2f}",
    "p99": lambda each: f"{each.ttft_p99_s:.2f}",
    "queue+prefill": lambda each: f"{each.ttft_queue_s:.2f}+{each.ttft_prefill_s:.2f}",
    "TPOT ms": lambda each: f"{each.tpot_mean_ms:.1f}",
    "ITL p99": lambda each: f"{each.itl_p99_ms:.1f}",
    "TBT": lambda each: f"{each.tbt_mean_ms:.1f}",
    "hit %": lambda each: f"{100 * each.hit_rate:.1f}/{100 * each.hit_rate_max:.1f}",
    "wasted": lambda each: f"{each.tokens_wasted:,}",
    "P/D busy %": lambda each: f"{100 * each.utilisation_prefill:.0f}/{100 * each.utilisation_decode:.0f}",
}


WIDE_COLUMNS = 150
"""Terminals below this get one column for each run instead of one row."""


def comparison_table(runs: Sequence[Run], width: int) -> Table:
    summaries = [run.summary for run in runs]
    first = summaries[0]
    title = f"{first.workload} ({common_notes(runs)}), digest {first.digest}, seed {first.seed}"
    caption = "highest rate with 90 % of offered requests in SLO: " + ", ".join(
        f"{name} {rate:.2f}/s" for name, rate in highest_rates(runs).items()
    )
    table = Table(title=title, caption=caption)
    cells = [[column, *[cell(summary) for summary in summaries]] for column, cell in COLUMNS.items()]
    if width >= WIDE_COLUMNS:
        cells = [list(column) for column in zip(*cells, strict=True)]
    for place, column in enumerate(cells[0]):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    return table
