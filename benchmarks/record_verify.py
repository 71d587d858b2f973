"""Keep the outcome of a `make verify` run as rows: `record_verify.py JUNIT_XML RESULT_CSV`."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from result_rows import ResultFile, cpu_device


def outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return kind
    return "passed"


def main(junit: Path, target: Path) -> None:
    rows = ResultFile(target, device=cpu_device(len(os.sched_getaffinity(0))), command="make verify")
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        rows.add(name, outcome(case), float(case.get("time", "0")), "s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
