"""`segue simulate` as typed: tables, JSON, sweeps, and errors that say what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from launcher.cli import app
from launcher.source_commit import source_commit
from simulator.cluster import Cluster
from simulator.session_front import BrokenPromise, Oracle

TRACE = Path(__file__).parent.parent / "data" / "conversation_60.jsonl"


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_policies_are_compared_and_every_figure_is_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    result = simulate("--trace", str(TRACE), "--count", "20", "--policy", "segue,random", "--json", str(out))
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["runs"]
    assert [row["policy"] for row in rows] == ["segue", "random"]
    assert all(row["complete"] and row["completed"] == row["offered"] == 20 for row in rows)
    assert "random" in result.stdout


def test_a_sweep_runs_every_value(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    result = simulate("--trace", str(TRACE), "--sweep", "rate=1,4", "--json", str(out))
    assert result.exit_code == 0, result.output
    slow, fast = json.loads(out.read_text())["runs"]
    assert fast["offered_per_s"] == pytest.approx(4 * slow["offered_per_s"])


def test_the_page_has_every_plot_and_figure_in_one_file(tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "figures.json"
    asked = ["--trace", str(TRACE), "--count", "12", "--compare", "segue,random", "--sweep", "rate=1,4"]
    result = simulate(*asked, "--html", str(page), "--json", str(numbers))
    assert result.exit_code == 0, result.output
    text, about = page.read_text(), json.loads(numbers.read_text())
    assert text.count('src="data:image/png;base64,') == 5
    assert not re.search(r'(src|href)="(?!data:)', text), "the page needs another file"
    for words in ("Goodput against rate", "Queue", "Cache hits", "of them wasted", "rate 4x", about["about"]["commit"]):
        assert words in text
    assert set(about["highest_good_rate_per_s"]) == {"segue", "random"}
    assert len(about["runs"][0]["series"]["ttft_s"]) == 201


def test_an_interrupted_run_keeps_and_marks_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cluster.run

    def interrupted(self: Cluster, *_: object) -> None:
        honest(self, until_us=10_000_000)
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "run", interrupted)
    out = tmp_path / "figures.json"
    result = simulate("--trace", str(TRACE), "--policy", "segue,random", "--json", str(out))
    assert result.exit_code == 130
    (row,) = json.loads(out.read_text())["runs"]
    assert (row["complete"], row["offered"] < 60) == (False, True)
    assert "(part)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--trace FILE is needed"),
        (["--trace", "none.jsonl"], "none.jsonl: No such file"),
        (["--trace", str(TRACE), "--policy", "best"], "unknown policy 'best'; known: segue"),
        (["--trace", str(TRACE), "--sweep", "rate"], "NAME=V1,V2"),
        (["--trace", str(TRACE), "--sweep", "rate=x"], "could not convert"),
        (["--trace", str(TRACE), "--speedup", "0"], "speed-up must be positive"),
        (["--trace", str(TRACE), "--model", "gpt"], "unknown model 'gpt'"),
        (["--trace", str(TRACE), "--weights", "bf16"], "does not fit 1 accelerators"),
        (["--trace", str(TRACE), "--start", "100"], "no requests from 100 on"),
        (["--trace", str(TRACE), "--prefill", "0"], "a cluster needs"),
        (["--trace", str(TRACE), "--kv-tokens", "-5"], "kv_tokens must be at least"),
        (["--trace", str(TRACE), "--noise", "-1"], "noise must be"),
        (["--trace", str(TRACE), "--slo-ttft", "nan"], "--slo-ttft: an objective must be positive"),
        (["--trace", str(TRACE), "--speedup", "inf"], "speed-up must be positive"),
        (["--trace", str(TRACE), "--start", "-1"], "--start: -1 is less than 0"),
        (["--trace", str(TRACE), "--kv", "fp4"], "unknown type 'fp4'; known: bf16, fp32, fp8"),
        (["--trace", str(TRACE), "--accelerators", "0"], "h200 has 1 to 8 accelerators, got 0"),
        (["--trace", str(TRACE), "--accelerators", "16"], "h200 has 1 to 8 accelerators, got 16"),
        (["--trace", str(TRACE), "--sweep", "view_delay_us=-1"], "view_delay_us must be at least 0"),
        (["--trace", str(TRACE), "--tiers", "tape"], "unknown tier 'tape'; known: dram, ssd"),
        (["--trace", str(TRACE), "--tiers", "dram=much"], "--tiers 'dram=much': NAME or NAME=TOKENS"),
        (["--trace", str(TRACE), "--tiers", "dram=1"], "tier dram: 1 tokens"),
        (["--trace", str(TRACE), "--html", "no/such/folder/page.html"], "No such file or directory"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(arguments: list[str], complaint: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_a_failing_seed_is_printed_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate("--faults", "--seeds", "2").exit_code == 0

    def break_promise(*_: object) -> None:
        raise BrokenPromise("as planned")

    monkeypatch.setattr(Oracle, "take", break_promise)
    result = simulate("--faults", "--seed", "5", "--seeds", "2")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert f"seed 5, commit {source_commit()}: BrokenPromise" in said
    assert "0 of 2 seeds kept every invariant" in said


def test_an_interrupted_campaign_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_at(seed: int) -> None:
        if seed == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr("simulator.faults.run_seed", interrupted_at)
    result = simulate("--faults", "--seed", "5", "--seeds", "10")
    assert result.exit_code == 130
    said = " ".join(result.stderr.split())
    assert "interrupted: 8 of 10 seeds were not run" in said
    assert "2 of 2 seeds kept every invariant" in said
