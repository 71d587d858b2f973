"""What is seen on the terminal: a bar with live rates while the load runs, a table when it is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench_client.records import Exchange
from bench_client.slo import Slo, describe_slo
from bench_client.summary import Spread, Summary, ttft_us

WINDOW_S = 10.0
"""Live rates cover this much of the past."""

CLIENT_LAG_MS_MAX = 20.0
"""Above this p99 the client's own delay is seen in the results."""


class View:
    """Prints to `console`; on no terminal the bar is left out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent: deque[tuple[float, Exchange]] = deque()
        self._open = self._finished = self._failed = 0
        self._seconds: float | None = None
        self._begun_s = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def warming(self, requests: int) -> Iterator[None]:
        with self._console.status(f"warming up with {requests} requests"):
            yield

    @contextmanager
    def running(self, total: int | None, seconds: float | None) -> Iterator[None]:
        """`total` requests, or None and `seconds` say how far it is."""
        self._seconds = seconds if total is None else None
        self._begun_s = time.monotonic()
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            self._progress, self._task = bar, bar.add_task(self._text(), total=total if total else seconds)
            yield
        self._progress = self._task = None

    def sent(self) -> None:
        self._open += 1
        self._refresh()

    def done(self, exchange: Exchange) -> None:
        self._open = max(self._open - 1, 0)
        self._finished += 1
        self._failed += not exchange.ok
        self._recent.append((time.monotonic(), exchange))
        self._refresh()

    def _refresh(self) -> None:
        if self._progress is not None and self._task is not None:
            past_s = time.monotonic() - self._begun_s
            far = self._finished if self._seconds is None else min(past_s, self._seconds)
            self._progress.update(self._task, completed=far, description=self._text())

    def _text(self) -> str:
        now_s = time.monotonic()
        while self._recent and now_s - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        window_s = max(min(WINDOW_S, now_s - self._begun_s), 1e-3)
        recent = [exchange for _, exchange in self._recent if exchange.ok]
        first = [value / 1e3 for value in map(ttft_us, recent) if value is not None]
        parts = [
            f"{self._finished} done",
            f"{self._open} open",
            f"{len(recent) / window_s:.1f} req/s",
            f"{sum(exchange.tokens_output or 0 for exchange in recent) / window_s:.0f} tok/s",
        ]
        parts += [f"TTFT p50 {median(first):.0f} ms"] if first else []
        parts += [f"[red]{self._failed} failed[/red]"] if self._failed else []
        return "  ".join(parts)


def show_summary(console: Console, summary: Summary, slo: Slo) -> None:
    console.print(latency_table(summary), "")
    for line in summary_lines(summary, slo):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def latency_table(summary: Summary) -> Table:
    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("ms", style="bold")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows = {"TTFT": summary.ttft_ms, "TPOT": summary.tpot_ms, "ITL": summary.itl_ms, "E2E": summary.e2e_ms}
    for name, spread in rows.items():
        table.add_row(name, *(_numbers(spread) if spread is not None else ["-"] * 5))
    return table


def _numbers(spread: Spread) -> list[str]:
    return [f"{value:.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.maximum)]


def summary_lines(summary: Summary, slo: Slo) -> list[str]:
    """One fact per line; also what makes the numbers doubtful."""
    lines = [
        f"requests   {summary.requests_ok} of {summary.requests} ok in {summary.duration_s:.1f} s, "
        f"{summary.requests_per_s:.2f}/s",
        f"tokens     {_per_s(summary.tokens_output_per_s)} out, {_per_s(summary.tokens_input_per_s)} in",
    ]
    if summary.cached_share is not None:
        lines.append(f"cached     {summary.cached_share:.1%} of {summary.tokens_input} prompt tokens")
    if summary.good is not None:
        lines.append(
            f"goodput    {summary.goodput_per_s or 0:.2f}/s, {summary.good_share or 0:.1%} of requests meet "
            f"{describe_slo(slo)}"
        )
    lines += [
        f"error      {count} x {reason}: {summary.error_examples[reason]}" for reason, count in summary.errors.items()
    ]
    return lines + doubts(summary)


def doubts(summary: Summary) -> list[str]:
    found = []
    if summary.client_lag_ms is not None and summary.client_lag_ms.p99 > CLIENT_LAG_MS_MAX:
        found.append(f"doubt      the client itself was {summary.client_lag_ms.p99:.0f} ms late (p99)")
    if summary.answers_short:
        found.append(
            f"doubt      {summary.answers_short} answers are shorter than asked for (does the server end early?)"
        )
    if summary.requests_ok and summary.tokens_output is None:
        found.append("doubt      the server sends no usage: no TPOT and no token rates")
    return found


def _per_s(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.1f} tok/s"
