"""`segue doctor`: what could keep a cluster from running here, each with the remedy.

A check reads one thing and returns one finding. `fail` means that `segue up` with its defaults cannot work; `warn`
means that it works less well than it could.
"""

from __future__ import annotations

import errno
import importlib.metadata
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec
import psutil
from rich.markup import escape

from launcher.host_facts import SHARED_MEMORY, read_gpus, read_host_facts
from launcher.runtime_dir import base_dir, stale_clusters

GIB = 1 << 30
DISK_FREE_BYTES_MIN = 1 * GIB
MEMORY_FREE_BYTES_MIN = 2 * GIB
"""Two instances of a 135M model in fp32 with their page pools and a local Ray take about 3 GiB at most."""
SHM_FREE_BYTES_MIN = 256 << 20
SHM_FREE_BYTES_GOOD = 3 * GIB
OPEN_FILES_MIN = 1024
OPEN_FILES_GOOD = 4096
PORT_MAX = 65535
PYTHON_MIN = (3, 11)

PACKAGES_NEEDED = ("grpcio", "protobuf", "pyzmq", "msgspec", "tokenizers", "fastapi", "uvicorn")
PACKAGES_BY_EXTRA = {"torch": "worker", "safetensors": "worker", "gguf": "worker", "ray": "ray"}


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    level: Level
    what: str
    detail: str
    remedy: str = ""


STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def render(finding: Finding) -> str:
    style = STYLES[finding.level]
    line = f"[{style}]{finding.level:<4}[/{style}]  {escape(finding.what):<14} {escape(finding.detail)}"
    return line + (f"\n{'':22}-> {escape(finding.remedy)}" if finding.remedy else "")


def examine(ports: Mapping[str, int]) -> list[Finding]:
    """All findings, in the order in which they are worth fixing. `ports`: option name to number."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        check_packages,
        check_memory,
        check_shared_memory,
        check_disk,
        check_open_files,
        check_processor,
        check_gpu,
        check_leftovers,
    )
    return [check() for check in checks] + [check_port(option, port) for option, port in ports.items()]


def graded(what: str, value: int, *, least: int, good: int, unit: str, remedy: str) -> Finding:
    """Below `least` fails, below `good` warns. Values in GiB are printed with one decimal."""
    text = f"{value / GIB:.1f} {unit}" if unit.startswith("GiB") else f"{value} {unit}"
    if value < least:
        return Finding(Level.FAIL, what, text, remedy)
    return Finding(Level.WARN, what, text, remedy) if value < good else Finding(Level.OK, what, text)


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_MIN:
        return Finding(Level.FAIL, "Python", version, "use Python 3.11 or newer: make PYTHON=python3.12 serve")
    return Finding(Level.OK, "Python", version)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> Finding:
    versions = {package: installed_version(package) for package in (*PACKAGES_NEEDED, *PACKAGES_BY_EXTRA)}
    missing = [package for package, version in versions.items() if version is None]
    if not missing:
        listing = ", ".join(f"{package} {versions[package]}" for package in ("torch", "ray", "grpcio"))
        return Finding(Level.OK, "packages", listing)
    if missing == ["ray"]:
        return Finding(
            Level.WARN, "packages", "ray is missing", "pip install 'segue[ray]', or run with --local-processes"
        )
    extras = sorted({PACKAGES_BY_EXTRA[package] for package in missing if package in PACKAGES_BY_EXTRA})
    remedy = f"pip install 'segue[{','.join(extras)}]' -c constraints.txt" if extras else "pip install segue"
    return Finding(Level.FAIL, "packages", f"missing: {', '.join(missing)}", remedy)


def check_memory() -> Finding:
    return graded(
        "memory",
        psutil.virtual_memory().available,
        least=MEMORY_FREE_BYTES_MIN,
        good=2 * MEMORY_FREE_BYTES_MIN,
        unit="GiB available",
        remedy="free memory, or use fewer instances: --aggregated 1 --kv-memory 256MiB",
    )


def check_shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding(Level.FAIL, "/dev/shm", "missing", "mount -t tmpfs tmpfs /dev/shm")
    return graded(
        "/dev/shm",
        shutil.disk_usage(SHARED_MEMORY).free,
        least=SHM_FREE_BYTES_MIN,
        good=SHM_FREE_BYTES_GOOD,
        unit="GiB free",
        remedy="mount -o remount,size=4G /dev/shm (in Docker: --shm-size=4g), or a smaller --kv-memory",
    )


def check_disk() -> Finding:
    free = shutil.disk_usage(base_dir()).free
    remedy = f"free space in {base_dir()}, or point TMPDIR elsewhere: logs and Ray's session go there"
    return graded("disk", free, least=DISK_FREE_BYTES_MIN, good=2 * DISK_FREE_BYTES_MIN, unit="GiB free", remedy=remedy)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    remedy = "ulimit -n 65536" if hard == resource.RLIM_INFINITY or hard > soft else "raise nofile in limits.conf"
    return graded("open files", allowed, least=OPEN_FILES_MIN, good=OPEN_FILES_GOOD, unit="allowed", remedy=remedy)


def check_processor() -> Finding:
    cores = read_host_facts().cores
    if cores < 2:
        return Finding(Level.WARN, "processor", "1 core", "prefill and decode will share it: use --aggregated 1")
    return Finding(Level.OK, "processor", f"{cores} cores")


def check_gpu() -> Finding:
    gpus = read_gpus()
    if not gpus:
        return Finding(Level.OK, "GPU", "none: instances run on the CPU")
    listing = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in gpus)
    torch_version = installed_version("torch") or ""
    if torch_version.endswith("+cpu"):
        remedy = "this torch has no CUDA: make clean, then make serve without a CPU TORCH_INDEX"
        return Finding(Level.WARN, "GPU", f"{listing}; torch {torch_version}", remedy)
    return Finding(Level.OK, "GPU", listing)


def check_leftovers() -> Finding:
    stale = stale_clusters()
    if stale:
        remedy = "the next `segue up` removes it"
        return Finding(Level.WARN, "leftovers", f"of {len(stale)} killed cluster(s) in {base_dir()}", remedy)
    return Finding(Level.OK, "leftovers", "none")


def check_port(option: str, port: int, host: str = "127.0.0.1") -> Finding:
    if not 0 <= port <= PORT_MAX:
        return Finding(Level.FAIL, f"port {port}", "no such port", f"choose one in 0 .. {PORT_MAX} with {option}")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = f"stop what uses it (ss -ltnp 'sport = :{port}'), or choose another with {option}"
            if error.errno != errno.EADDRINUSE:
                remedy = f"choose an IPv4 address of this machine with --host, or another port with {option}"
            return Finding(Level.FAIL, f"port {port}", error.strerror or str(error), remedy)
    return Finding(Level.OK, f"port {port}", "free")
