from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "record_verify.py"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good[1]" time="1.5"/>
<testcase classname="tests.a" name="test_bad" time="0.25"><failure message="no"/></testcase>
<testcase classname="tests.b" name="test_left_out" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_each_run_appends_its_outcomes_as_rows(tmp_path: Path) -> None:
    junit, target = tmp_path / "verify.xml", tmp_path / "verify.csv"
    junit.write_text(JUNIT)
    for _ in range(2):
        command = [sys.executable, str(SCRIPT), str(junit), str(target)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    with target.open() as file:
        rows = [(row["shape"], row["metric"], row["value"], row["unit"]) for row in csv.DictReader(file)]
    once = [
        ("tests.a::test_good[1]", "passed", "1.5", "s"),
        ("tests.a::test_bad", "failure", "0.25", "s"),
        ("tests.b::test_left_out", "skipped", "0", "s"),
    ]
    assert rows == once * 2
