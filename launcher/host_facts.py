"""What the machine offers, read once at start. Everything that is decided from it is decided in pure functions."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

SHARED_MEMORY = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    cores: int
    """CPUs this process may use: affinity and container quota applied."""
    shm_free_bytes: int
    gpus: tuple[Gpu, ...] = ()


def read_host_facts() -> HostFacts:
    return HostFacts(
        cores=_cores(), shm_free_bytes=shared_memory_free_bytes(), gpus=read_gpus() if _torch_has_cuda() else ()
    )


def _torch_has_cuda() -> bool:
    """By its version, which tags CPU builds `+cpu`: to import it would take seconds."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    if not CPU_QUOTA.exists():
        return cores
    quota, period = CPU_QUOTA.read_text().split()
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def shared_memory_free_bytes() -> int:
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def read_gpus() -> tuple[Gpu, ...]:
    """GPUs as nvidia-smi lists them: importing torch to ask would cost seconds and a CUDA context."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ()
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """Rows `index, name, MiB` of nvidia-smi; CUDA_VISIBLE_DEVICES is not applied."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    return tuple(Gpu(int(row[0]), ", ".join(row[1:-1]), int(row[-1]) * MIB) for row in rows if row[-1].isdigit())
