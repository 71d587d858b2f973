"""Several runs beside each other: what they are called, which to look at first, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from simulator.report import RunSummary, Slo, highest_good_rate
from simulator.series import RunSeries

SCHEMA = "segue-simulate/1"


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures depend on beside what each run says of itself."""

    version: str
    commit: str
    """Of the sources; "unknown" outside of a checkout, `+` behind it where they were changed."""
    command: str
    cluster: str
    """In words: model, hardware, instances."""
    slo: Slo


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison."""

    label: str
    """What differs from the others of its policy: the point of the sweep, or nothing."""
    summary: RunSummary
    series: RunSeries


def busiest(runs: Sequence[Run]) -> list[Run]:
    """The runs of that label, common to all policies, at which most was offered a second."""
    policies = {run.summary.policy for run in runs}
    common = [run for run in runs if {each.summary.policy for each in runs if each.label == run.label} == policies]
    label = max(common or runs, key=lambda run: run.summary.offered_per_s).label
    return [run for run in runs if run.label == label]


def common_notes(runs: Sequence[Run]) -> str:
    """What was done to the workload of every run; what differs is the label of each."""
    notes = [note for note in runs[0].summary.notes if all(note in run.summary.notes for run in runs)]
    return ", ".join(notes) or "as recorded"


def policies_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.summary.policy for run in runs))


def highest_rates(runs: Sequence[Run]) -> dict[str, float]:
    """Of each policy the highest rate among its runs with 90 % of offered requests in the objectives."""
    return {
        policy: highest_good_rate([run.summary for run in runs if run.summary.policy == policy])
        for policy in policies_of(runs)
    }


def render_json(runs: Sequence[Run], about: Circumstances) -> bytes:
    numbers = {
        "schema": SCHEMA,
        "about": about,
        "complete": all(run.summary.complete for run in runs),
        "highest_good_rate_per_s": highest_rates(runs),
        "runs": [
            {"label": run.label, **msgspec.to_builtins(run.summary), "series": msgspec.to_builtins(run.series)}
            for run in runs
        ],
    }
    return msgspec.json.format(msgspec.json.encode(numbers), indent=1) + b"\n"
