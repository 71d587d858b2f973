"""A comparison as one HTML file that needs no other. Needs the extra `reports`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench_client.page import STYLE, escaped, image, tile
from simulator.comparison import Circumstances, Run, busiest, common_notes, highest_rates, policies_of
from simulator.figures import draw
from simulator.report import RunSummary

ROWS: dict[str, dict[str, Callable[[RunSummary], str]]] = {
    "Requests": {
        "offered per second": lambda one: f"{one.offered_per_s:.2f}",
        "offered": lambda one: f"{one.offered:,}",
        "accepted": lambda one: f"{one.accepted:,}",
        "rejected": lambda one: f"{one.rejected:,}",
        "completed": lambda one: f"{one.completed:,}",
        "failed": lambda one: f"{one.failed:,}",
        "planned anew": lambda one: f"{one.replanned:,}",
    },
    "Goodput": {
        "in objectives, of offered": lambda one: f"{one.attainment:.1%}",
        "in objectives, of accepted": lambda one: f"{one.attainment_accepted:.1%}",
        "in objectives, per second": lambda one: f"{one.goodput_per_s:.2f}",
    },
    "Time to first token, s": {
        "mean": lambda one: f"{one.ttft_mean_s:.3f}",
        "p50": lambda one: f"{one.ttft_p50_s:.3f}",
        "p90": lambda one: f"{one.ttft_p90_s:.3f}",
        "p99": lambda one: f"{one.ttft_p99_s:.3f}",
        "of it queue": lambda one: f"{one.ttft_queue_s - one.ttft_fetch_s:.3f}",
        "of it transfer of cached tokens": lambda one: f"{one.ttft_fetch_s:.3f}",
        "of it prefill": lambda one: f"{one.ttft_prefill_s:.3f}",
        "hand-off after it": lambda one: f"{one.transfer_tail_s:.3f}",
    },
    "Output tokens, ms": {
        "TPOT mean": lambda one: f"{one.tpot_mean_ms:.1f}",
        "TPOT p99": lambda one: f"{one.tpot_p99_ms:.1f}",
        "ITL p99": lambda one: f"{one.itl_p99_ms:.1f}",
        "TBT (longest tenth of gaps)": lambda one: f"{one.tbt_mean_ms:.1f}",
    },
    "Cache": {
        "hits, of prompt tokens": lambda one: f"{one.hit_rate:.1%}",
        "of them on the GPU": lambda one: f"{one.hit_rate_tiers['gpu']:.1%}",
        "from another instance": lambda one: f"{one.hit_rate_tiers['peer']:.1%}",
        "from DRAM": lambda one: f"{one.hit_rate_tiers['dram']:.1%}",
        "from SSD": lambda one: f"{one.hit_rate_tiers['ssd']:.1%}",
        "the trace's maximum": lambda one: f"{one.hit_rate_max:.1%}",
    },
    "Work": {
        "prompt tokens computed": lambda one: f"{one.tokens_prefilled:,}",
        "of them wasted": lambda one: f"{one.tokens_wasted:,}",
        "GB moved": lambda one: f"{one.bytes_moved / 1e9:,.1f}",
        "preemptions": lambda one: f"{one.preemptions:,}",
        "P busy": lambda one: f"{one.utilisation_prefill:.1%}",
        "D busy": lambda one: f"{one.utilisation_decode:.1%}",
        "correlation of the two": lambda one: f"{one.load_correlation:+.2f}",
        "digest of the trace": lambda one: one.digest,
        "seed": lambda one: f"{one.seed}",
        "seconds simulated": lambda one: f"{one.virtual_s:,.0f}",
    },
}


def render_html(runs: Sequence[Run], about: Circumstances) -> str:
    first, chosen = runs[0].summary, busiest(runs)
    parts = [run.summary.policy for run in runs if not run.summary.complete]
    doubts = f"<p class=doubts>Ended early, figures of a part only: {escaped(', '.join(parts))}</p>" if parts else ""
    figures = "".join(
        f"<section><h2>{escaped(title)}{_point(runs, chosen) if number or title != 'Goodput against rate' else ''}</h2>"
        f"{image(title, png)}</section>"
        for number, (title, png) in enumerate(draw(runs, about.slo))
    )
    return PAGE.format(
        style=STYLE,
        title=escaped(f"{first.workload}: {', '.join(policies_of(runs))}"),
        under=escaped(f"{about.cluster} · {common_notes(runs)} · Segue {about.version}, commit {about.commit}"),
        tiles="".join(
            tile(f"{run.summary.policy} {run.label}".strip(), f"{run.summary.attainment:.1%}", _tile_note(run))
            for run in chosen
        ),
        doubts=doubts,
        figures=figures,
        tables="".join(_table(name, rows, runs) for name, rows in ROWS.items()) + _highest(runs),
        slo=escaped(
            f"Objectives: first token within {about.slo.ttft_us / 1e6:g} s, or {about.slo.ttft_factor:g} times the "
            f"unloaded prefill where that is longer, and {about.slo.tpot_us / 1e3:g} ms per output token."
        ),
        command=escaped(about.command),
    )


def _point(runs: Sequence[Run], chosen: Sequence[Run]) -> str:
    """What a figure of one point of the sweep says about itself."""
    return f", {escaped(chosen[0].label)}" if len({run.label for run in runs}) > 1 else ""


def _tile_note(run: Run) -> str:
    return f"in objectives, {run.summary.goodput_per_s:.2f} of {run.summary.offered_per_s:.2f} per second"


def _table(name: str, rows: dict[str, Callable[[RunSummary], str]], runs: Sequence[Run]) -> str:
    heads = "".join(
        f"<th>{escaped(run.summary.policy)}<br>{escaped(run.label)}{'' if run.summary.complete else ' (part)'}</th>"
        for run in runs
    )
    lines = "".join(
        f"<tr><td>{escaped(row)}</td>{''.join(f'<td>{cell(run.summary)}</td>' for run in runs)}</tr>"
        for row, cell in rows.items()
    )
    return f"<h2>{escaped(name)}</h2><div class=wide><table><tr><th></th>{heads}</tr>{lines}</table></div>"


def _highest(runs: Sequence[Run]) -> str:
    lines = "".join(
        f"<tr><td>{escaped(policy)}</td><td>{f'{rate:.2f}' if rate else 'none of these'}</td></tr>"
        for policy, rate in highest_rates(runs).items()
    )
    return f"<h2>Highest rate with 90 % of offered requests in the objectives, per second</h2><table>{lines}</table>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}
.wide {{ overflow-x: auto }}
.wide td, .wide th {{ white-space: nowrap }}
</style></head><body>
<h1>{title}</h1><p class=under>{under}</p>
<div class=tiles>{tiles}</div>
<p class=muted>{slo} Simulated by the production cores under a virtual clock: see docs/simulator.md for what is modelled
and what is not.</p>
{doubts}{figures}{tables}
<details><summary>command</summary><pre>{command}</pre></details>
</body></html>
"""
