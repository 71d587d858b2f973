"""Kernel tests run on the GPU where there is one, and in Triton's interpreter on the CPU where there is none.

Triton reads TRITON_INTERPRET when it is first imported, so it is set here, before any kernel module is. Compile-only
tests are not disturbed: they use a child process without the interpreter (see compiling.py).
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton.language" in sys.modules:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: kernels cannot be interpreted")
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session: a GPU, or the CPU by way of the interpreter."""
    torch.set_num_threads(1)
    return torch.device("cuda" if HAS_GPU else "cpu")
