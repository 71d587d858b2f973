"""A run as files: `result.json`, `requests.jsonl`, figures, and `report.html` that needs no other file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench_client.options import BenchOptions
from bench_client.page import STYLE, escaped, image, tile
from bench_client.run import Result
from bench_client.slo import describe_slo
from bench_client.summary import Spread, Summary
from bench_client.view import doubts
from segue.errors import ConfigError

SCHEMA = "segue-bench/1"

PLOTS_EXTRA = "plots need matplotlib: pip install matplotlib"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Circumstances of a run that are not options."""

    version: str
    started_at: str
    python: str
    machine: str


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def prepare_folder(folder: Path) -> None:
    """Before the load, so that an hour of it is not lost to a typing error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").touch()
    except OSError as error:
        raise ConfigError(f"--output: {folder}: {error.strerror}") from error


def write_reports(result: Result, options: BenchOptions, facts: Facts, folder: Path, *, plots: bool) -> list[Path]:
    """Returns the files in the order in which to read them."""
    numbers = {
        "schema": SCHEMA,
        "facts": facts,
        "options": options,
        "model": result.model,
        "workload": result.workload,
        "summary": result.summary,
    }
    encoded = msgspec.json.format(msgspec.json.encode(numbers), indent=2)
    (folder / "result.json").write_bytes(encoded + b"\n")
    (folder / "requests.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(result.exchanges))
    figures: list[Path] = []
    if plots:
        from bench_client.plots import draw_all  # matplotlib is an extra, and takes half a second to import

        figures = draw_all(result.exchanges, options.slo, folder)
    page = render_html(result, options, facts, figures, encoded.decode())
    (folder / "report.html").write_text(page, encoding="utf-8")
    return [folder / "report.html", *figures, folder / "result.json", folder / "requests.jsonl"]


def render_html(result: Result, options: BenchOptions, facts: Facts, figures: Sequence[Path], numbers: str) -> str:
    """Every text from outside is escaped: model names and server messages are not ours."""
    summary = result.summary
    images = "".join(image(figure.stem, figure.read_bytes()) for figure in figures)
    doubtful = "".join(f"<li>{escaped(line.removeprefix('doubt').strip())}</li>" for line in doubts(summary))
    errors = "".join(
        f"<tr><td>{escaped(reason)}</td><td>{count}</td><td class=text>{escaped(example)}</td></tr>"
        for reason, count, example in ((name, n, summary.error_examples[name]) for name, n in summary.errors.items())
    )
    return PAGE.format(
        style=STYLE,
        title=escaped(f"{result.model}: {options.mode}"),
        under=escaped(
            f"{options.url} · {result.workload} · {facts.started_at} · Segue {facts.version}, {facts.machine}"
        ),
        tiles="".join(tile(*entry) for entry in _tiles(summary)),
        slo=escaped(f"SLO: {describe_slo(options.slo)}"),
        rows="".join(_latency_row(*row) for row in _latencies(summary)),
        doubts=f"<section class=doubts><h2>Read with care</h2><ul>{doubtful}</ul></section>" if doubtful else "",
        errors=f"<section><h2>Errors</h2><table><tr><th>reason</th><th>count</th><th class=text>first message</th></tr>"
        f"{errors}</table></section>"
        if errors
        else "",
        figures=images or f"<p class=muted>No figures; {escaped(PLOTS_EXTRA)}</p>",
        numbers=escaped(numbers),
    )


def _tiles(summary: Summary) -> list[tuple[str, str, str]]:
    tiles = [
        ("requests ok", f"{summary.requests_ok:,}", f"of {summary.requests:,} in {summary.duration_s:.1f} s"),
        ("requests", f"{summary.requests_per_s:.2f}", "per second"),
    ]
    if summary.tokens_output_per_s is not None:
        tiles.append(("output", f"{summary.tokens_output_per_s:,.0f}", "tokens per second"))
    if summary.good is not None:
        tiles.append(
            ("goodput", f"{summary.goodput_per_s or 0:.2f}", f"per second, {summary.good_share or 0:.1%} good")
        )
    if summary.cached_share is not None:
        tiles.append(("prompt tokens cached", f"{summary.cached_share:.1%}", f"of {summary.tokens_input or 0:,}"))
    return tiles


def _latencies(summary: Summary) -> list[tuple[str, Spread | None]]:
    return [("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms), ("ITL", summary.itl_ms), ("E2E", summary.e2e_ms)]


def _latency_row(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"<tr><td>{name}</td><td colspan=7 class=muted>not measured</td></tr>"
    values = (spread.mean, spread.minimum, spread.p50, spread.p90, spread.p99, spread.maximum)
    cells = "".join(f"<td>{value:,.1f}</td>" for value in values)
    return f"<tr><td>{name}</td>{cells}<td class=muted>{spread.count:,}</td></tr>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}</style></head><body>
<h1>{title}</h1><p class=under>{under}</p>
<div class=tiles>{tiles}</div>
<section><h2>Latencies, ms</h2><table>
<tr><th></th><th>mean</th><th>min</th><th>p50</th><th>p90</th><th>p99</th><th>max</th><th>count</th></tr>{rows}</table>
<p class=muted>{slo}. TTFT and E2E end at the first and last chunk with content; TPOT = (E2E - TTFT) / (tokens - 1);
ITL is the gap between chunks.</p></section>
{doubts}{errors}
<section><h2>Distribution and course</h2>{figures}</section>
<details><summary>result.json</summary><pre>{numbers}</pre></details>
</body></html>
"""
