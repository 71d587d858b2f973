"""Rows of the long versions, for benchmarks/results: written where the variable says so, so that a test run of every
day leaves the tree as it was."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORD_VARIABLE = "SEGUE_ENDURANCE_ROWS"


def record(shape: str, metric: str, value: float, unit: str) -> None:
    """Append one row to benchmarks/results/endurance.csv, when SEGUE_ENDURANCE_ROWS is set."""
    print(f"{shape}: {metric} {value:.4g} {unit}")
    if not os.environ.get(RECORD_VARIABLE):
        return
    spec = importlib.util.spec_from_file_location("result_rows", BENCHMARKS / "result_rows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    device = module.cpu_device(len(os.sched_getaffinity(0)))
    rows = module.ResultFile(module.RESULTS / "endurance.csv", device=device, command="pytest tests/endurance -m slow")
    rows.add(shape, metric, value, unit)
