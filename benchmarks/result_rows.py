"""Rows of benchmark results: one CSV file per subject, appended to, with what is needed to compare them later."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("date", "commit", "device", "command", "shape", "metric", "value", "unit")


def commit() -> str:
    """Short hash of HEAD; a `+` behind it says that the tree had changes."""
    run = {"cwd": RESULTS.parent, "capture_output": True, "text": True, "check": False}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **run).stdout.strip() or "unknown"  # type: ignore[call-overload]
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()  # type: ignore[call-overload]
    return f"{head}+" if changed else head


def cpu_device(cores: int) -> str:
    """Processor model and the number of cores that were used."""
    models = [line.partition(":")[2] for line in _cpuinfo() if line.startswith("model name")]
    return f"{models[0].strip() if models else platform.machine()}, {cores} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class ResultFile:
    """Appends rows of one run; the header is written with the first row of a new file."""

    def __init__(self, path: Path, *, device: str, command: str) -> None:
        self._path = path
        self._common = (datetime.date.today().isoformat(), commit(), device, command)

    def add(self, shape: str, metric: str, value: float | str, unit: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = not self._path.exists()
        text = f"{value:.4g}" if isinstance(value, float) else value
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow((*self._common, shape, metric, text, unit))
        print(f"{shape:<34} {metric:<14} {text:>10} {unit}", flush=True)
