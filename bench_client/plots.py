"""Two figures of a run: how latencies are distributed, and what happened over time. Needs the extra `reports`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench_client.records import Exchange
from bench_client.slo import Slo
from bench_client.summary import e2e_us, itl_us, tpot_us, ttft_us

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
LINE, BAD, GOOD = "#2563a8", "#c0392b", "#2f855a"

DPI = 144

TIMELINE_BINS = 60

QUANTILES = (0.5, 0.9, 0.99)

FARTHEST_BOUND = 2.5
"""A bound farther right than this times the largest value would squeeze the curve to a wall; its number is enough."""


def draw_all(exchanges: Sequence[Exchange], slo: Slo, folder: Path) -> list[Path]:
    """Write `latencies.png` and `timeline.png`; returns those that have something to show."""
    measured = [exchange for exchange in exchanges if exchange.ok and exchange.content_us]
    if not measured:
        return []
    figures = {"latencies.png": latencies(measured, slo), "timeline.png": timeline(exchanges, slo)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=DPI, facecolor="white")
    return [folder / name for name in figures]


def latencies(measured: Sequence[Exchange], slo: Slo) -> Figure:
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    panels = figure.subplots(2, 2)
    values = {
        "ttft": [value / 1e3 for value in map(ttft_us, measured) if value is not None],
        "tpot": [value / 1e3 for value in map(tpot_us, measured) if value is not None],
        "e2e": [value / 1e3 for value in map(e2e_us, measured) if value is not None],
        "itl": [gap / 1e3 for exchange in measured for gap in itl_us(exchange)],
    }
    titles = {
        "ttft": "Time to first token (TTFT)",
        "tpot": "Time per output token (TPOT)",
        "itl": "Gap between chunks (ITL)",
        "e2e": "Whole answer (E2E)",
    }
    for axes, (metric, title) in zip(panels.flat, titles.items(), strict=True):
        _distribution(axes, title, sorted(values[metric]), slo.get(metric))
    about = "milliseconds; the curves are the share of requests (ITL: of gaps) at or below"
    figure.supxlabel(about, fontsize=9, color=MUTED)
    return figure


def _distribution(axes: Axes, title: str, ordered: list[float], bound_us: int | None) -> None:
    """Cumulative share over milliseconds; a log axis when the values span more than a factor of 30."""
    dress(axes, title)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if not ordered:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED)
        return
    axes.plot(ordered, np.linspace(0, 1, len(ordered)), color=LINE, linewidth=1.8)
    if _spans_decades(ordered):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    at = [float(np.percentile(ordered, 100 * share)) for share in QUANTILES]
    axes.plot(at, QUANTILES, "o", color=LINE, markersize=5, zorder=3)
    numbers = "   ".join(f"p{100 * share:.0f} {value:,.1f}" for share, value in zip(QUANTILES, at, strict=True))
    if bound_us is not None:
        bound = bound_us / 1e3
        numbers += f"   SLO {bound:g} met by {np.mean(np.array(ordered) <= bound):.1%}"
        if bound <= FARTHEST_BOUND * ordered[-1]:
            axes.axvline(bound, color=GOOD, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.set_title(title, fontsize=10.5, loc="left", color=INK, pad=19)
    axes.text(0, 1.025, numbers, transform=axes.transAxes, fontsize=8.5, color=MUTED)


def _spans_decades(ordered: list[float]) -> bool:
    tenth, ninetieth = np.percentile(ordered, [10, 90])
    return bool(ordered[0] > 0 and ordered[-1] > 30 * ordered[0] and ninetieth > 5 * tenth)


def timeline(exchanges: Sequence[Exchange], slo: Slo) -> Figure:
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    first, rate, still_open = figure.subplots(3, 1, sharex=True, height_ratios=[1.5, 1, 1])
    start_us = min(exchange.sent_us for exchange in exchanges)
    _first_tokens(first, exchanges, start_us, slo.get("ttft"))
    edges_s = np.linspace(0, max((one.ended_us - start_us) / 1e6 for one in exchanges) + 1e-6, TIMELINE_BINS + 1)
    _token_rate(rate, exchanges, start_us, edges_s)
    _open_requests(still_open, exchanges, start_us)
    still_open.set_xlabel("seconds since the first request", fontsize=9, color=MUTED)
    still_open.set_xlim(0, edges_s[-1])
    return figure


def _first_tokens(axes: Axes, exchanges: Sequence[Exchange], start_us: int, bound_us: int | None) -> None:
    dress(axes, "TTFT of each request, by the time it was sent (ms)")
    measured = [one for one in exchanges if one.ok and one.content_us]
    failed = [(one.sent_us - start_us) / 1e6 for one in exchanges if not one.ok]
    sent_s = [(one.sent_us - start_us) / 1e6 for one in measured]
    axes.scatter(sent_s, [(ttft_us(one) or 0) / 1e3 for one in measured], s=12, color=LINE, alpha=0.65, linewidths=0)
    axes.set_ylim(bottom=0)
    if bound_us is not None:
        axes.axhline(bound_us / 1e3, color=GOOD, linewidth=1.4, linestyle=(0, (4, 2)), label="SLO")
    if failed:
        base = axes.get_xaxis_transform()
        axes.scatter(failed, [0.03] * len(failed), s=24, color=BAD, marker="x", transform=base, label="failed")
    if failed or bound_us is not None:
        axes.legend(loc="upper right", frameon=False, fontsize=8.5, ncols=2)


def _token_rate(axes: Axes, exchanges: Sequence[Exchange], start_us: int, edges_s: np.ndarray) -> None:
    """A chunk stands for its share of the answer's tokens: servers may put several into one."""
    dress(axes, "Output tokens per second")
    at_s: list[float] = []
    weights: list[float] = []
    for one in exchanges:
        if one.content_us:
            at_s += [(at_us - start_us) / 1e6 for at_us in one.content_us]
            weights += [(one.tokens_output or len(one.content_us)) / len(one.content_us)] * len(one.content_us)
    counts, _ = np.histogram(at_s, bins=edges_s, weights=weights)
    axes.stairs(counts / np.diff(edges_s), edges_s, color=LINE, fill=True, alpha=0.85)
    axes.set_ylim(bottom=0)


def _open_requests(axes: Axes, exchanges: Sequence[Exchange], start_us: int) -> None:
    dress(axes, "Open requests")
    changes = sorted([(one.sent_us, 1) for one in exchanges] + [(one.ended_us, -1) for one in exchanges])
    times_s = [0.0, *((at_us - start_us) / 1e6 for at_us, _ in changes)]
    axes.step(times_s, [0, *np.cumsum([change for _, change in changes])], where="post", color=LINE, linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def dress(axes: Axes, title: str) -> None:
    """The look that all figures share."""
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=8.5, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
