"""The two commands, dry: what `make` would run, without running it; and pins that fit the ranges they narrow."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
STAMPS = (".stamp-venv", ".stamp-torch", ".stamp-run", ".stamp-demo-model", ".stamp-dev", ".stamp-redis")


def dry_run(target: str, *settings: str) -> str:
    """What make says it would run; settings of a `make test` around this one are kept out."""
    command = ["make", "--no-print-directory", "-n", target, *settings]
    kept = ("PATH", "HOME", "LANG")
    environment = {name: value for name, value in os.environ.items() if name in kept}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An environment folder whose stamps say that everything is installed."""
    for stamp in STAMPS:
        (tmp_path / stamp).touch()
    return tmp_path


def test_torch_comes_from_the_index_that_was_named(tmp_path: Path) -> None:
    commands = dry_run("serve", f"VENV={tmp_path}", "TORCH_INDEX=https://torch.example/cpu")
    assert re.search(r"pip .*install --index-url https://torch\.example/cpu torch==", commands)


def test_torch_comes_from_pips_own_index_otherwise(tmp_path: Path) -> None:
    assert "--index-url" not in dry_run("serve", f"VENV={tmp_path}", "TORCH_INDEX=")


def test_torch_is_installed_before_anything_that_needs_it(tmp_path: Path) -> None:
    commands = dry_run("serve", f"VENV={tmp_path}")
    assert commands.index("install  torch==") < commands.index("install -e")


def test_second_start_installs_nothing(installed: Path) -> None:
    commands = dry_run("serve", f"VENV={installed}")
    assert "pip" not in commands
    assert "segue up" in commands


def test_changed_dependencies_are_installed_again(installed: Path) -> None:
    (installed / ".stamp-run").unlink()
    assert "install -e '.[worker,ray]'" in dry_run("serve", f"VENV={installed}")


def test_options_are_passed_on(installed: Path) -> None:
    assert "--prefill 2 --http-port 18000" in dry_run(
        "serve", f"VENV={installed}", "ARGS=--prefill 2 --http-port 18000"
    )


def test_tests_run_without_gpu_and_long_matrices(installed: Path) -> None:
    assert '-m "not gpu and not slow"' in dry_run("test", f"VENV={installed}")


def test_tests_find_a_redis_server(installed: Path) -> None:
    (installed / ".stamp-redis").unlink()
    assert "fetch_redis.sh build/redis" in dry_run("test", f"VENV={installed}")
    assert "fetch_redis.sh" not in dry_run("serve", f"VENV={installed}")


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    return [Requirement(line) for line in project["dependencies"] + extras]


def test_pins_lie_in_the_declared_ranges() -> None:
    outside = [str(need) for need in declared() if need.name in pins() and pins()[need.name] not in need.specifier]
    assert outside == []


def test_makefile_and_constraints_name_the_same_torch() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^TORCH_VERSION := (\S+)$", makefile, re.MULTILINE)[1] == pins()["torch"]  # type: ignore[index]
