"""The arrows between folders, and which module may touch which transport."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
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
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def importers(graph: grimp.ImportGraph, imported: str) -> set[str]:
    """Modules outside `imported` that import it, or anything below it, directly."""
    targets = {module for module in graph.modules if module == imported or module.startswith(imported + ".")}
    direct = {importer for target in targets for importer in graph.find_modules_that_directly_import(target)}
    return direct - targets


def test_layers_and_forbidden_imports_hold() -> None:
    """In a process of its own: its logging set-up silences the loggers that exist."""
    command: list[str | Path] = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml"]
    assert subprocess.run([*command, "--no-cache"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("imported", ["grpc", "segue_proto", "google"])
def test_grpc_is_met_only_in_rpc_and_gateway_modules(graph: grimp.ImportGraph, imported: str) -> None:
    strangers = {
        module
        for module in importers(graph, imported)
        if not module.startswith("segue_proto")
        and "gateway" not in module.split(".")
        and not module.rpartition(".")[2].startswith(("rpc", "gateway"))
    }
    assert strangers == set()


@pytest.mark.parametrize("imported", ["redis", "zmq"])
def test_a_transport_is_met_only_in_modules_that_carry_its_name(graph: grimp.ImportGraph, imported: str) -> None:
    assert {module for module in importers(graph, imported) if not module.endswith(f"_{imported}")} == set()


def test_ray_is_met_only_in_the_launcher(graph: grimp.ImportGraph) -> None:
    assert {module for module in importers(graph, "ray") if not module.startswith("launcher.")} == set()


def test_the_conductor_meets_of_kvstore_only_directory_and_events(graph: grimp.ImportGraph) -> None:
    allowed = ("kvstore.directory", "kvstore.events")
    met = {
        imported
        for module in graph.modules
        if module.startswith("conductor")
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith("kvstore") and not imported.startswith(allowed)
    }
    assert met == set()


BLOCKED_IMPORTS = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
"""


def import_without(blocked: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(BLOCKED_IMPORTS).format(blocked=blocked, modules=modules)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def modules_below(graph: grimp.ImportGraph, *packages: str) -> list[str]:
    return sorted(module for module in graph.modules if module.partition(".")[0] in packages)


def test_conductor_imports_where_torch_and_ray_are_not_installed(graph: grimp.ImportGraph) -> None:
    modules = modules_below(graph, "conductor", "segue", "segue_proto")
    done = import_without({"torch", "triton", "ray", "transformers", "gguf", "safetensors"}, modules)
    assert done.returncode == 0, done.stderr


def test_engine_and_kernels_import_without_transports(graph: grimp.ImportGraph) -> None:
    modules = modules_below(graph, "engine", "segue_kernels")
    done = import_without({"ray", "grpc", "zmq", "redis", "transformers"}, modules)
    assert done.returncode == 0, done.stderr


def test_the_segue_command_starts_without_torch_ray_and_development_packages() -> None:
    """`segue --help` and the clients stay quick, and a run-time installation is enough."""
    done = import_without({"torch", "ray", "transformers", "matplotlib", "openai", "pytest"}, ["launcher.cli"])
    assert done.returncode == 0, done.stderr
