"""The figures of a comparison, as PNG. Needs the extra `reports`."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench_client.plots import DPI, GOOD, MUTED, dress
from simulator.comparison import Run, busiest, policies_of
from simulator.report import Slo
from simulator.series import CURVE_POINTS, RunSeries

COLOURS = ("#2563a8", "#d1641f", "#2f855a", "#7b4fa3", "#b8336a", "#5f7d16", "#11808a", "#8a6d3b", "#4a5568", "#c0392b")
"""Of policies, in order; used again beyond."""

CAPTION_COLUMNS = 5

BUSY_PANELS_MAX = 6
"""Load over time is drawn for so many policies: the table has the others."""


def draw(runs: Sequence[Run], slo: Slo) -> list[tuple[str, bytes]]:
    """(what it shows, PNG), in the order in which to read them. Curves are of one point: the busiest one at which
    every policy has run."""
    chosen = busiest(runs)
    figures: list[tuple[str, Figure]] = []
    if len({run.summary.offered_per_s for run in runs}) > 1:
        figures.append(("Goodput against rate", _goodput(runs)))
    figures.append(("Latencies", _latencies(chosen, slo)))
    figures.append(("Load of prefill and decode instances", _loads(chosen)))
    figures.append(("Queue", _queue(chosen)))
    figures.append(("Cache hits", _hits(chosen)))
    return [(title, _png(figure)) for title, figure in figures]


def _goodput(runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(10, 3.7), layout="constrained")
    rates, shares = figure.subplots(1, 2)
    dress(rates, "Requests per second within both objectives")
    dress(shares, "Share of offered requests within both objectives")
    for number, policy in enumerate(policies_of(runs)):
        own = sorted((run.summary for run in runs if run.summary.policy == policy), key=lambda one: one.offered_per_s)
        offered, colour = [one.offered_per_s for one in own], COLOURS[number % len(COLOURS)]
        rates.plot(offered, [one.goodput_per_s for one in own], "o-", color=colour, markersize=4, label=policy)
        shares.plot(offered, [one.attainment for one in own], "o-", color=colour, markersize=4)
    most = max(run.summary.offered_per_s for run in runs)
    rates.plot([0, most], [0, most], color=MUTED, linewidth=0.9, linestyle=(0, (2, 3)), label="offered")
    shares.axhline(0.9, color=GOOD, linewidth=1.2, linestyle=(0, (4, 2)))
    shares.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    shares.set_ylim(0, 1.04)
    rates.set_ylim(bottom=0)
    for axes in (rates, shares):
        axes.set_xlim(left=0)
        axes.set_xlabel("requests offered per second", fontsize=9, color=MUTED)
    _legend(figure, rates)
    return figure


def _latencies(runs: Sequence[Run], slo: Slo) -> Figure:
    figure = Figure(figsize=(10, 3.7), layout="constrained")
    first, rest = figure.subplots(1, 2)
    _distributions(first, "Time to first token, s", [run.series.ttft_s for run in runs], slo.ttft_us / 1e6)
    _distributions(rest, "Time per output token, ms", [run.series.tpot_ms for run in runs], slo.tpot_us / 1e3)
    for line, run in zip(first.lines, runs, strict=False):
        line.set_label(run.summary.policy)
    _legend(figure, first)
    return figure


def _distributions(axes: Axes, title: str, curves: Sequence[Sequence[float]], bound: float) -> None:
    dress(axes, f"{title}: share of requests at or below")
    for number, curve in enumerate(curves):
        shares = np.linspace(0, 1, CURVE_POINTS)[: len(curve)]
        axes.plot(curve, shares, color=COLOURS[number % len(COLOURS)], linewidth=1.7)
    values = [value for curve in curves for value in curve if value > 0]
    if values and max(values) > 30 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if values and min(values) <= bound <= 2.5 * max(values):
        axes.axvline(bound, color=GOOD, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def _loads(runs: Sequence[Run]) -> Figure:
    shown = runs[:BUSY_PANELS_MAX]
    figure = Figure(figsize=(10, 0.9 + 1.55 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, shown, strict=True):
        series, correlation = run.series, run.summary.load_correlation
        dress(axes, f"{run.summary.policy}: busy share of engines (correlation {correlation:+.2f})")
        for values, colour, label in (
            (series.load_prefill, COLOURS[0], "prefill"),
            (series.load_decode, COLOURS[1], "decode"),
        ):
            axes.plot(_times_s(series, values), values, color=colour, linewidth=1.2, label=label)
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panels[-1].set_xlim(0, max(len(run.series.load_decode) * run.series.bin_s for run in shown))
    panels[-1].set_xlabel("seconds", fontsize=9, color=MUTED)
    _legend(figure, panels[0])
    return figure


def _queue(runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(10, 3.0), layout="constrained")
    axes = figure.subplots()
    dress(axes, "Requests whose prefill has not begun")
    for number, run in enumerate(runs):
        values, colour = run.series.queued, COLOURS[number % len(COLOURS)]
        axes.plot(_times_s(run.series, values), values, color=colour, linewidth=1.3, label=run.summary.policy)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds", fontsize=9, color=MUTED)
    _legend(figure, axes)
    return figure


def _hits(runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(10, 1.0 + 0.36 * len(runs)), layout="constrained")
    axes = figure.subplots()
    dress(axes, "Share of prompt tokens found in a cache, by where they were; the line is the trace's maximum")
    names = [run.summary.policy for run in runs]
    left = np.zeros(len(runs))
    for number, tier in enumerate(runs[0].summary.hit_rate_tiers):
        widths = np.array([run.summary.hit_rate_tiers[tier] for run in runs])
        if number == 0 or widths.any():
            axes.barh(names, widths, left=left, height=0.62, color=COLOURS[number % len(COLOURS)], label=tier)
        left += widths
    axes.axvline(runs[0].summary.hit_rate_max, color=GOOD, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.grid(visible=False, axis="y")
    _legend(figure, axes)
    return figure


def _times_s(series: RunSeries, values: Sequence[float]) -> np.ndarray:
    times: np.ndarray = (np.arange(len(values)) + 0.5) * series.bin_s
    return times


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = min(len(handles), CAPTION_COLUMNS)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
