from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from launcher import runtime_dir
from launcher.cli import app
from launcher.runtime_dir import RuntimeDir, stale_clusters, sweep_stale_clusters

KILLED_LAUNCHER = """
import os, signal, sys
from launcher import runtime_dir
from pathlib import Path
runtime_dir.base_dir = lambda: Path(sys.argv[1])
print(runtime_dir.RuntimeDir().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime_dir, "base_dir", lambda: tmp_path)
    return tmp_path


def test_folder_is_private(base: Path) -> None:
    assert stat.S_IMODE(RuntimeDir().path.stat().st_mode) == 0o700


def test_remove_takes_folder_and_shared_memory_of_this_cluster_alone(base: Path, tmp_path: Path) -> None:
    first, second = RuntimeDir(), RuntimeDir()
    segments = [runtime_dir.SHARED_MEMORY / f"{cluster.cluster}-pages" for cluster in (first, second)]
    for segment in segments:
        segment.touch()
    first.remove()
    assert (first.path.exists(), segments[0].exists()) == (False, False)
    assert (second.path.exists(), segments[1].exists()) == (True, True)
    second.remove()


def test_a_living_launchers_folder_is_not_stale(base: Path) -> None:
    RuntimeDir()
    assert stale_clusters() == []


def test_a_killed_launchers_leftovers_are_swept(base: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_LAUNCHER, str(base)], capture_output=True, text=True, timeout=60, check=False
    )
    left = Path(killed.stdout.strip())
    segment = runtime_dir.SHARED_MEMORY / f"{left.name}-pages"
    segment.touch()
    assert sweep_stale_clusters() == [left]
    assert (left.exists(), segment.exists()) == (False, False)


def test_a_start_that_is_refused_sweeps_too(base: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_LAUNCHER, str(base)], capture_output=True, text=True, timeout=60, check=False
    )
    result = CliRunner().invoke(app, ["up", "--model", str(base / "nowhere")])
    assert result.exit_code == 2
    assert not Path(killed.stdout.strip()).exists()


def remark(cluster: RuntimeDir, field: int, value: str) -> None:
    owner = cluster.path / runtime_dir.OWNER_FILE
    mark = owner.read_text().split()
    mark[field] = value
    owner.write_text(" ".join(mark))


@pytest.mark.parametrize(("field", "value"), [(1, "1"), (2, "another-boot")])
def test_a_reused_pid_does_not_keep_a_folder_alive(base: Path, field: int, value: str) -> None:
    cluster = RuntimeDir()
    remark(cluster, field, value)
    assert stale_clusters() == [cluster.path]


def test_a_living_launchers_folder_stays_when_the_clock_is_set(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RuntimeDir()
    boot_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 1.0)
    monkeypatch.setattr("psutil.boot_time", lambda: boot_s + 1.0)
    assert stale_clusters() == []


def test_folder_of_another_container_is_left_alone(base: Path) -> None:
    """Its temporary directory may be shared with it, its processes are not to be seen."""
    cluster = RuntimeDir()
    remark(cluster, 0, "4194304")
    remark(cluster, 3, "pid:[1]")
    assert stale_clusters() == []


def test_folders_that_are_not_ours_are_left_alone(base: Path) -> None:
    (base / "segue-notes").mkdir()
    assert sweep_stale_clusters() == []
    assert (base / "segue-notes").exists()


def test_what_could_not_be_deleted_is_swept_later(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dying process wrote on while its folder was deleted."""
    script = [sys.executable, "-c", KILLED_LAUNCHER, str(base)]
    path = Path(subprocess.run(script, capture_output=True, text=True, check=False).stdout.strip())
    with monkeypatch.context() as hindered:
        hindered.setattr("shutil.rmtree", lambda folder, ignore_errors: None)
        sweep_stale_clusters()
    assert path.exists()
    sweep_stale_clusters()
    assert not path.exists()
