"""Fit the cost model to rows of benchmark results; prints it as JSON (for `segue up --cost-model`) and its errors.

python benchmarks/fit_cost_model.py gpu_engine_h200.csv --kv-token-bytes 131072 > cost.json
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import msgspec
from result_rows import RESULTS

from segue.cost_rows import fit_rows, newest, read_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a file of benchmarks/results, or a path")
    parser.add_argument("--kv-token-bytes", type=int, required=True, help="K/V bytes of a token, all layers")
    parser.add_argument("--commit", default="", help="only rows of this commit (default: of the newest)")
    parser.add_argument("--command", default="", help="only rows whose command contains this")
    asked = parser.parse_args()
    path = asked.results if asked.results.exists() else RESULTS / asked.results
    with path.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["commit"].startswith(asked.commit) and asked.command in row["command"]
        ]
    try:
        fitted = fit_rows(read_rows(rows if asked.commit else newest(rows)), asked.kv_token_bytes)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(fitted.model)).decode())
    for kind in ("prefill", "decode"):
        errors = getattr(fitted, f"{kind}_error_median"), getattr(fitted, f"{kind}_error_max")
        print(f"{kind}: median error {errors[0]:.1%}, largest {errors[1]:.1%}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
