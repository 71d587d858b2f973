"""The wheel holds our packages under their own names, and nothing that shadows another distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP_LEVEL_NAMES = {
    "launcher",
    "conductor",
    "prefill_worker",
    "decode_worker",
    "worker_runtime",
    "engine",
    "kvstore",
    "segue_kernels",
    "segue_proto",
    "segue",
    "bench_client",
    "simulator",
}
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names in a wheel built, without network, from a copy of the tracked kinds of file."""
    source = tmp_path_factory.mktemp("source") / "segue"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results")
    shutil.copytree(ROOT, source, ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_top_level_names(wheel_names: list[str]) -> None:
    assert {name.partition("/")[0] for name in wheel_names if ".dist-info/" not in name} == TOP_LEVEL_NAMES


@pytest.mark.parametrize("name", ["segue_proto/v1/inference.proto", "segue_proto/v1/worker_pb2.pyi", "segue/config.py"])
def test_wheel_carries_file(wheel_names: list[str], name: str) -> None:
    assert name in wheel_names


@pytest.mark.parametrize("shadow", ["proto", "kernels"])
def test_folder_that_would_shadow_another_package_is_not_importable(shadow: str) -> None:
    assert not (ROOT / shadow / "__init__.py").exists()
