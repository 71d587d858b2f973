from __future__ import annotations

from launcher.host_facts import Gpu, parse_gpus, read_host_facts

LISTING = "0, NVIDIA H200, 143771\n1, NVIDIA A100, 80 GB edition, 81920\n"


def test_gpu_rows_are_read() -> None:
    assert parse_gpus(LISTING) == (
        Gpu(0, "NVIDIA H200", 143771 << 20),
        Gpu(1, "NVIDIA A100, 80 GB edition", 81920 << 20),
    )


def test_rows_without_a_memory_size_are_passed_over() -> None:
    assert parse_gpus("0, NVIDIA Thing, [N/A]\n\n") == ()


def test_this_machine_has_a_core() -> None:
    assert read_host_facts().cores >= 1
