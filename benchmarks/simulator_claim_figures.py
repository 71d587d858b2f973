"""Figures of the claims in docs/claims.md, as PNG files. Needs the extra `reports`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench_client.plots import BAD, DPI, MUTED, dress
from simulator.figures import COLOURS
from simulator.load_sampler import LoadSample

SMOOTHED_S = 10
"""Load over time is drawn as the mean of so many samples: a step's own noise is not what is looked for."""


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})
    print(f"wrote {path}")


def loads_over_time(
    runs: Mapping[str, Sequence[LoadSample]], titles: Mapping[str, str], ttft_s: float, tbt_ms: float, last_s: float
) -> Figure:
    """P's and D's load of each policy as shares of their objectives, until `last_s`."""
    figure = Figure(figsize=(10, 0.9 + 1.9 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (policy, samples) in zip(panels, runs.items(), strict=True):
        shown = [each for each in samples if each.at_s <= last_s]
        at_s = [each.at_s for each in shown]
        dress(axes, titles[policy])
        prefill = [each.waiting_s / ttft_s for each in shown]
        decode = [each.step_ms / tbt_ms for each in shown]
        for values, colour, label in (
            (prefill, COLOURS[0], "prefill: queue over the objective of TTFT"),
            (decode, COLOURS[1], "decode: step time over the limit of TBT"),
        ):
            axes.plot(at_s, smoothed(values), color=colour, linewidth=1.2, label=label)
        axes.axhline(1.0, color=BAD, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.set_ylim(bottom=0)
    panels[-1].set_xlim(0, last_s)
    panels[-1].set_xlabel("seconds", fontsize=9, color=MUTED)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Centred mean over SMOOTHED_S samples; shorter at the ends."""
    kernel = np.ones(SMOOTHED_S)
    sums: np.ndarray = np.convolve(values, kernel, mode="same") / np.convolve(np.ones(len(values)), kernel, mode="same")
    return sums


def curves(
    title: str,
    points: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    *,
    published: Mapping[str, float] | None = None,
    log: bool = False,
) -> Figure:
    """One line per policy; `published` values are dashed, in the policy's colour."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    dress(axes, title)
    for number, (policy, pairs) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        x, y = zip(*sorted(pairs), strict=True)
        axes.plot(x, y, "o-", color=colour, markersize=4, linewidth=1.5, label=policy)
        if published and policy in published:
            axes.axhline(published[policy], color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label, fontsize=9, color=MUTED)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    return figure
